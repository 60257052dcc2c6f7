// What a launch needs to know: plain records of pointers, sizes and strides, filled in by bindings.cu and read by the
// kernels. Nothing here knows Python, torch or TVM FFI. Strides count elements. Offsets are formed in 64 bits, always:
// a pool of 4096 rows of 32 heads of 128x128 has more than 2^31 elements.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace gdn {

enum class DType : int32_t { f32, bf16, f16, e4m3, e5m2 };

enum class Gate : int32_t { none, linear, log, raw };

// Index tensors are int32 or int64; which one is a fact of the call, not of the build.
struct Index {
  const void* data;  // null: not given
  bool wide;         // int64
};

struct Strides3 {
  int64_t batch, token, head;  // of [B, T, H, *]; packed tensors [T, H, *] have no batch stride
};

struct States {
  void* data;  // [rows, heads, V, K], K contiguous; null: not given
  int64_t row, head, v;
  DType dtype;
  bool aligned;  // every row of K elements starts at a multiple of 16 bytes
};

struct PageTable {
  Index indices;  // null data: the call has no page table
  Index indptr;
  Index last_len;
  int64_t page_size;  // 0 in decode
};

struct DecodeParams {
  const void *q, *k, *v, *a, *b, *A_log, *dt_bias;
  void* output;
  Strides3 q_stride, k_stride, v_stride, a_stride, b_stride, output_stride;
  DType dtype;  // of q, k, v and output: bf16 or f16
  DType a_dtype, b_dtype, A_log_dtype, dt_bias_dtype;
  bool qk_aligned;  // every head of q and of k starts at a multiple of 16 bytes
  States state;
  States steps;          // states after each token, [B, T, heads, V, K]: row is the batch stride
  int64_t steps_token;   // and this the token stride
  Index read_rows, write_rows;  // both null: row b, or the page table
  PageTable pages;
  int32_t batch, batch_begin, tokens, heads, group;  // group: state heads a q head
  int32_t head_size_k, head_size_v;
  float scale;
  bool l2norm, update_state;
};

struct SlotsParams {
  PageTable pages;
  Index cu_seqlens;  // null: decode
  int32_t num_seqs;
  int32_t *read, *write, *starts, *prefix;  // [num_seqs]; the last two null in decode
};

struct PrefillParams {
  const void *q, *k, *v, *g, *beta, *A_log, *dt_bias;
  void* output;
  Strides3 q_stride, k_stride, v_stride, g_stride, beta_stride, output_stride;  // batch unused; head of g: stride of dim 1
  DType dtype;  // of q, k, v and output
  DType g_dtype, beta_dtype, A_log_dtype, dt_bias_dtype;
  Gate gate;
  bool beta_is_logit, l2norm;
  bool q_aligned, k_aligned, v_aligned;  // every head starts at a multiple of 16 bytes
  bool output_paired;                    // every head of output starts at a multiple of 4 bytes
  bool zero_rest;                        // tokens outside [cu_seqlens[0], cu_seqlens[N]) get zeros
  int64_t num_tokens;
  int32_t num_seqs, heads, q_group, k_group, v_group;  // state heads a head of q, k, v
  int32_t head_size_k, head_size_v;
  float scale;
  Index cu_seqlens;
  States initial, final, checkpoints;  // data null: not given
  bool copy_empty;                     // a zero-length sequence gets its initial state as final state
  Index read_rows, write_rows, checkpoint_starts, checkpoint_rows, prefix_lens;
  int64_t checkpoint_every;
  PageTable pages;
  // The path for sm_90a (prefill/sm90_launch.cu), chosen by prefill_heuristics.py: V rows a CTA (0: the portable path), chunks
  // a segment (0: sequences are not split), operands in fp16 for bf16 inputs too.
  int32_t sm90_rows, sm90_segment;
  bool sm90_half;
  bool sm90_pairs;    // in one kernel, where its tensors are ones that the copy engine can take
  int32_t fused_rows;  // not 0: all in one launch (prefill/fused.cu), so many V rows a CTA
  // Scratch of the two stages; see prefill/workspace.h.
  void* workspace;
  int64_t workspace_bytes;
};

// A CUDA failure, told to Python as a RuntimeError by bindings.cu.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw CudaError(std::string(what) + ": " + cudaGetErrorString(error));
}

// The launches. Each runs on `stream` of the current device and returns at once.
void launch_decode(const DecodeParams& params, cudaStream_t stream);
void launch_page_slots(const SlotsParams& params, cudaStream_t stream);
void launch_prefill(const PrefillParams& params, cudaStream_t stream);

// Bytes of PrefillParams::workspace that a call wants.
int64_t prefill_workspace(const PrefillParams& params);

}  // namespace gdn
