// Which pool rows a sequence reads and writes: from index tensors, or from the page table. One place for both, so that
// the kernels that derive rows themselves and the page-slots kernel cannot disagree.
#pragma once
#include "numeric.cuh"

namespace gdn {

struct DecodeRows {
  int64_t read, write;  // negative: padding
};

// The last page is written; the page before it is read when the token opens a new page.
__device__ __forceinline__ DecodeRows decode_rows(const PageTable& pages, int64_t b) {
  const int64_t first = load_index(pages.indptr, b), end = load_index(pages.indptr, b + 1);
  const int64_t opens = load_index(pages.last_len, b) == 1;
  // A sequence of one token has nothing to decode from: the caller must not pass it, and it reads no other's page.
  if (end - 1 - opens < first) return {-1, -1};
  const int64_t write = load_index(pages.indices, end - 1);
  return {opens ? load_index(pages.indices, end - 2) : write, write};
}

struct PrefillRows {
  int64_t read, write;  // negative: zero state; no store
  int64_t starts;       // entry of the checkpoint rows of the first checkpoint
  int64_t prefix;       // tokens before this call
};

__device__ __forceinline__ PrefillRows prefill_rows(const PageTable& pages, int64_t b, int64_t new_tokens) {
  const int64_t first = load_index(pages.indptr, b), end = load_index(pages.indptr, b + 1);
  const int64_t last = load_index(pages.last_len, b), size = pages.page_size;
  const int64_t total = (end - first - 1) * size + last, prefix = total - new_tokens;
  PrefillRows rows;
  rows.prefix = prefix;
  rows.starts = first + prefix / size;
  rows.read = prefix > 0 ? load_index(pages.indices, first + (prefix - 1) / size) : -1;
  // A total that fills its last page is that page's checkpoint, written as such.
  rows.write = new_tokens == 0 || last == size ? -1 : load_index(pages.indices, end - 1);
  return rows;
}

}  // namespace gdn
