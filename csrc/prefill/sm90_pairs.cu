// Prefill on sm_90a of short sequences, in one kernel: what sm90_chunks.cu leaves in memory for sm90_recurrence.cu is made here where it is used. For
// bf16 inputs at K = V = 128 that the copy engine can take in place, sequences not split. The other two files say what is computed, and why
// it is rounded where it is.
//
//   why      A second launch, and matrices that go to memory and come back, cost more than their making does where a sequence has a few chunks.
//   pairs    A pair of CTAs on two multiprocessors (a cluster) takes one head of a sequence: each 64 V rows of the state, and each makes every
//            other chunk's matrices and copies them into the other's shared memory. A sequence of one chunk does not wait for that copy:
//            both make its matrices.
//   roles    consumers  a warpgroup that keeps its V rows of the state in registers, as in the recurrence
//            makers     a warpgroup; a warp has 16 rows of K K^T and Q K^T, makes its rows of the scores, inverts its diagonal block, and finds its row
//                       of blocks of the inverse in turns, that of the last 16 tokens (the first warp: rows are reversed) in three
//            helpers    warps that look up the sequence; ask the copy engine for tiles, and to take outputs back; make gates; and see to the
//                       chunks that the other CTA makes
//   rings    tiles of q, k and V, four; matrices with gates, three.
//   inverse  By rows of blocks, transposed, so that accumulators of one product are left operands of the next:
//                X[i, j]^T = -(sum over m from j to i - 1 of X[m, j]^T L[i, m]^T) X[i, i]^T
//            L[i, m] and X[i, i] are what warp i has; X[m, j] comes by shared memory.
//
// Many chunks are not for this kernel, nor many heads: consumers and makers on one multiprocessor take more instructions than its caches next to the
// schedulers hold, and wait for instructions more than for anything else (docs/performance_notes.md).
#include "../common/device.h"
#include "sm90_chunk_steps.cuh"
#include "sm90_state_steps.cuh"
#include "states.cuh"

#if GDN_SM90
namespace gdn {
namespace sm90 {
namespace {

constexpr int kConsumers = 128, kMakers = 128, kHelpers = 128, kThreads = kConsumers + kMakers + kHelpers;
constexpr int kBringer = (kConsumers + kMakers) / 32, kGateMaker = kBringer + 1, kFinder = kBringer + 2, kExpecter = kBringer + 3;  // warps
constexpr int kRows = 64;        // V rows of a CTA
constexpr int kBoxBytes = 8192;  // 64 tokens by 64 columns in 16 bits

// Shared memory: a ring for what comes from memory, and one for what is made of it.
constexpr int kTiles = 4, kValuesAt = 2 * kTileBytes, kTilesBytes = kValuesAt + kBoxBytes;
static_assert(kKeysAt == 0 && kQueriesAt == kTileBytes, "layout");
constexpr int kMatrices = 3, kPageIn = kGatesAt + kGateBytes<__nv_bfloat16>, kMatricesBytes = kRecordBytes;  // of the form of records
static_assert(kPageIn + 8 <= kScoresAt, "there is a place behind the gates");
constexpr int kMatricesAt = kTiles * kTilesBytes, kCommonAt = kMatricesAt + kMatrices * kMatricesBytes;

// What a pair does.
struct Unit {
  Sequence sequence;
  int head, head_q, head_k, head_v, chunks;
  bool alone;  // one chunk, whose matrices both CTAs make
};

struct Common {
  uint64_t keys_full[kTiles], keys_freed[kTiles], values_full[kTiles], values_freed[kTiles];  // of tiles: k and q; v, later the output
  uint64_t made[kMatrices], used[kMatrices];
  uint64_t peer_ready[2];                   // the other CTA has a place for the matrices made here
  uint64_t gates_full[2], gates_empty[2];
  uint64_t found;                           // the unit is known
  Unit unit;
  alignas(16) float diagonals[4 * kPitch];  // of L; then of the inverse, transposed
  uint4 inverse[3][2][32];                  // X[1, 0], X[2, 1], X[2, 0] transposed, as left operands
  alignas(16) Gates gates[2];
  float scales[kChunk];                     // of rows that are normalised: all 1, and not read
};
constexpr int kSharedBytes = 1024 + kCommonAt + int(sizeof(Common));
static_assert(kSharedBytes <= 227 << 10, "shared memory of a multiprocessor");

// A ring's place and the parity of its barriers' phase, of the how many-th use.
__device__ __forceinline__ int parity_of(uint32_t use, int places) { return use / places % 2; }

// A parity tells a phase from its neighbours only. So nobody waits for tiles that can go and come again without him: makers wait for those of their own
// chunks, the expecter for the others', and as a place has chunks of one CTA only, neither misses a phase of it.
static_assert(kTiles % 2 == 0, "see above");
__device__ __forceinline__ void wait_keys(Common& common, uint32_t chunk) { barrier_wait(&common.keys_full[chunk % kTiles], parity_of(chunk, kTiles)); }
__device__ __forceinline__ const Unit& wait_unit(Common& common) {
  barrier_wait(&common.found, 0);
  return common.unit;
}

// Rows that are no tokens become zeros: a box brings neighbours' tokens, or what may be anything. By so many threads.
template <int kTogether>
__device__ __forceinline__ void clean(uint8_t* tiles, int from, int to, int thread) {
  for (int i = thread; i < 5 * kChunk * 8; i += kTogether) {
    const int row = i / 8 % kChunk, t = i < 4 * kChunk * 8 ? reversed_row(row) : row;  // v is in order
    if (t < from || t >= to) *reinterpret_cast<uint4*>(tiles + i * 16) = make_uint4(0, 0, 0, 0);
  }
}

// --- helpers -------------------------------------------------------------------------------------------------------------

// The pair's unit, by one thread.
__device__ __forceinline__ void find_unit(Common& common, const PrefillParams& p) {
  Unit& unit = common.unit;
  const uint32_t number = blockIdx.x / 2, index = number / uint32_t(p.heads);
  unit.sequence = get_sequence(p, int(index));
  unit.chunks = int(unit.sequence.chunks);
  unit.alone = unit.chunks == 1;
  unit.head = int(number - index * uint32_t(p.heads));
  unit.head_q = unit.head / p.q_group, unit.head_k = unit.head / p.k_group, unit.head_v = unit.head / p.v_group;
  barrier_arrive(&common.found);
}

// Brings tiles and takes outputs back from where the consumers left them, by one warp.
__device__ __forceinline__ void bring(uint8_t* ring, Common& common, const PrefillParams& p, const PairPlan& plan, int v0) {
  const int lane = threadIdx.x % 32;
  const Unit& unit = wait_unit(common);
  const auto take = [&](int chunk) {
    const uint8_t* values = ring + chunk % kTiles * kTilesBytes + kValuesAt;
    const int64_t token = unit.sequence.first_token(chunk);
    const int from = unit.sequence.from(chunk), to = unit.sequence.to(chunk);
    barrier_wait(&common.values_freed[chunk % kTiles], parity_of(chunk, kTiles));
    if (from == 0 && to == kChunk) {
      if (lane == 0) tensor_store(plan.output, v0, unit.head, int(token), values);
    } else {
      // A box would write to other sequences' tokens too.
      uint16_t* output = static_cast<uint16_t*>(p.output) + token * p.output_stride.token + unit.head * p.output_stride.head + v0;
#pragma unroll 4
      for (int i = from * 8 + lane; i < to * 8; i += 32)
        store_global(output + i / 8 * p.output_stride.token + i % 8 * 8, *reinterpret_cast<const uint4*>(values + tile_at(i / 8, i % 8)));
    }
    __syncwarp();
  };
#pragma unroll 1
  for (int chunk = 0; chunk < unit.chunks + kTiles; chunk++) {
    const int place = chunk % kTiles, token = int(unit.sequence.first_token(chunk));
    uint8_t* tiles = ring + place * kTilesBytes;
    if (chunk < unit.chunks) {
      if (chunk >= kTiles) barrier_wait(&common.keys_freed[place], parity_of(chunk - kTiles, kTiles));
      __syncwarp();
      if (elected()) {
        uint64_t* full = &common.keys_full[place];
        barrier_arrive_expect(full, 2 * kTileBytes);
        copy_tiles<true>(tiles, plan.k, plan.q, unit.head_k, unit.head_q, token, full);
      }
    }
    if (chunk >= kTiles && chunk - kTiles < unit.chunks) take(chunk - kTiles);
    if (chunk < unit.chunks && lane == 0) {
      uint64_t* full = &common.values_full[place];
      bulk_store_wait();
      barrier_arrive_expect(full, kBoxBytes);
      tensor_copy(tiles + kValuesAt, plan.v, v0, unit.head_v, token, full);
    }
    __syncwarp();
  }
  if (lane == 0) bulk_store_wait();
}

// Of the chunks whose matrices are made here, by one warp.
__device__ __forceinline__ void make_all_gates(Common& common, const PrefillParams& p) {
  const int rank = pair_rank();
  const Unit& unit = wait_unit(common);
  uint32_t made = 0;
#pragma unroll 1
  for (int chunk = unit.alone ? 0 : rank; chunk < unit.chunks; chunk += 2, made++) {
    const int from = unit.sequence.from(chunk), to = unit.sequence.to(chunk);
    GateBits bits;
    load_gates(bits, p, unit.sequence.first_token(chunk), from, to, unit.head);
    barrier_wait(&common.gates_empty[made % 2], parity_of(made, 2) ^ 1);
    make_gates<__nv_bfloat16>(p, common.gates[made % 2], bits, from, to);
    warp_arrive(&common.gates_full[made % 2]);
  }
}

// See to the chunks whose matrices come from the other CTA, by one warp: says when there is a place for them, and does with the tiles what the makers
// do with theirs.
template <class T>
__device__ __forceinline__ void expect(uint8_t* ring, Common& common, const PrefillParams& p) {
  const int lane = threadIdx.x % 32, rank = pair_rank();
  const Unit& unit = wait_unit(common);
  if (unit.alone) return;
#pragma unroll 1
  for (int chunk = 0; chunk < unit.chunks; chunk++) {
    if (chunk % 2 == rank) continue;
    const int place = chunk % kMatrices;
    if (chunk >= kMatrices) barrier_wait(&common.used[place], parity_of(chunk - kMatrices, kMatrices));
    if (lane == 0) barrier_arrive_peer(&common.peer_ready[chunk / 2 % 2]);
    wait_keys(common, chunk);
    uint8_t* tiles = ring + chunk % kTiles * kTilesBytes;
    const int from = unit.sequence.from(chunk), to = unit.sequence.to(chunk);
    if (from > 0 || to < kChunk) {
      barrier_wait(&common.values_full[chunk % kTiles], parity_of(chunk, kTiles));
      clean<32>(tiles, from, to, lane);
    }
    __syncwarp();
    if (p.l2norm)
#pragma unroll 1
      for (int i = 0; i < 8; i++) normalise_rows<T, T>(tiles + i / 4 * kTileBytes, Place(i % 4), i % 4, true, common.scales);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive_expect(&common.made[place], kMatricesBytes);
  }
}

// --- makers --------------------------------------------------------------------------------------------------------------

// What the consumers want of them, 16 tokens a warp.
__device__ __forceinline__ void write_gates(float* out, const Gates& gates, float scale, int warp) {
  const int lane = threadIdx.x % 32, t = 16 * warp + lane % 16;
  const float sum = gates.sum[t], beta = gates.beta[t], last = gates.sum[kChunk - 1];
  const int zeros = gates.zeros[t], zeros_last = gates.zeros[kChunk - 1];
  const float gamma = zeros == 0 ? exp2f(sum) : 0.f;
  if (lane < 16) {
    out[kGamma * kChunk + t] = gamma;
    if (t == kChunk - 1) out[kDecayAt] = gamma;
  } else {
    out[kScaleGamma * kChunk + t] = scale * gamma;
    out[kTail * kChunk + t] = zeros == zeros_last ? exp2f(last - sum) * beta : 0.f;
  }
}

// store_block() of a block that is there transposed.
template <class M>
__device__ __forceinline__ void put_transposed(char* matrix, int i, int j, const Block& x, int lane) {
  uint32_t tiles[4];
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) tiles[2 * n + e] = Pair<M>::pack(x[n][2 * e], x[n][2 * e + 1]);
  store_tiles_transposed(block_at(matrix, i, j) + lane * 16, tiles);
}

// This warp's diagonal block of the inverse of I + L, from L's, in place and transposed: column lane % 16 by substitution. Above the diagonal zeros,
// unless L is not finite.
__device__ __forceinline__ void invert_diagonal(float* block, int lane) {
  float x[16];
  const int column = lane % 16;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    if (i == 8) __syncwarp();  // no load of the second half goes before: registers are short
    float sum[2] = {column == i ? 1.f : 0.f, 0.f};
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 l = *reinterpret_cast<const float4*>(block + i * kStride + m);
      sum[0] = fmaf(-l.x, x[m], sum[0]);
      if (m + 1 < i) sum[1] = fmaf(-l.y, x[m + 1], sum[1]);
      if (m + 2 < i) sum[0] = fmaf(-l.z, x[m + 2], sum[0]);
      if (m + 3 < i) sum[1] = fmaf(-l.w, x[m + 3], sum[1]);
    }
    x[i] = sum[0] + sum[1];
  }
  __syncwarp();
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 16; i += 4) *reinterpret_cast<float4*>(block + column * kStride + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  __syncwarp();
}

// Block j of the diagonal of the inverse, transposed, as a left operand.
__device__ __forceinline__ Left diagonal_left(const float* diagonals, int j, int g, int q) {
  Block x;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float2 pair = make_float2(0.f, 0.f);
      if (h >= e) pair = *reinterpret_cast<const float2*>(diagonals + j * kPitch + (g + 8 * e) * kStride + 8 * h + 2 * q);
      x[h][2 * e] = pair.x, x[h][2 * e + 1] = pair.y;
    }
  return round_left(x);
}
__device__ __forceinline__ void give(uint4 (&to)[2][32], const Left& x, int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) to[h][lane] = make_uint4(x.x[h][0], x.x[h][1], x.x[h][2], x.x[h][3]);
}
__device__ __forceinline__ Left get(const uint4 (&from)[2][32], int lane) {
  Left x;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 y = from[h][lane];
    x.x[h][0] = y.x, x.x[h][1] = y.y, x.x[h][2] = y.z, x.x[h][3] = y.w;
  }
  return x;
}

// Coupling and scores of a chunk, by the makers together.
template <class T>
__device__ __forceinline__ void make_matrices(uint8_t* matrices, const Tiles& tiles, Common& common, const Gates& gates, float scale, int warp, int lane) {
  const auto in_order = [](float (&to)[8][4], const float (&from)[8][4]) {  // columns of a product by their tokens
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) to[n][i] = from[reversed_tile(n)][i];
  };
  const int g = lane / 4, q = lane % 4;
  char *coupling = reinterpret_cast<char*>(matrices), *scores = coupling + kScoresAt;
  float* mine = common.diagonals + warp * kPitch;
  Right lower[3] = {};  // -L left of the diagonal, the block next to it first
  // K K^T first, since the inverse hangs on it.
  float product[8][4];
  {
    float kk_product[8][4], kk[8][4];
    multiply_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) multiply_tiles<T>(kk_product, tiles.k_columns + columns_at(k), tiles.k_columns + columns_at(k), k > 0);
    multiply_commit();
#pragma unroll
    for (int k = 0; k < 8; k++) multiply_tiles<T>(product, tiles.q_columns + columns_at(k), tiles.k_columns + columns_at(k), k > 0);
    multiply_commit();
    write_gates(reinterpret_cast<float*>(matrices + kGatesAt), gates, scale, warp);
    multiply_wait<1>();
    pin(kk_product);
    in_order(kk, kk_product);
    Block keys;
    select_block(keys, kk, warp);
    float* place = lower_place(common.diagonals, warp);
    each_decay<T>(gates, warp, [&](int e, int h, const float(&decay)[2], float beta) { put_lower(place, keys, e, h, decay, beta); });
    float by[2] = {-gates.target[16 * warp + g], -gates.target[16 * warp + g + 8]};
    each_left_block(
        [&](int j, const Block& x) {
          const Right y = round_right(x);
#pragma unroll
          for (int d = 0; d < 3; d++)  // by selection: an index would put them into memory
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
              for (int n = 0; n < 4; n++) lower[d].x[h][n] = warp - 1 - j == d ? y.x[h][n] : lower[d].x[h][n];
        },
        gates, kk, by, warp);
  }
  __syncwarp();
  invert_diagonal(mine, lane);
  Right diagonal;
  {
    Block x, below;
    load_diagonal(x, below, mine);
    store_block<T>(coupling, warp, warp, below, lane);  // without the identity
    diagonal = round_right(x);
  }
  multiply_wait<0>();
  pin(product);
  {
    float qk[8][4];
    in_order(qk, product);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) qk[n][i] *= scale;
    Block queries, x = {};
    select_block(queries, qk, warp);
    each_decay<T>(gates, warp, [&](int e, int h, const float(&decay)[2], float) { set_scores(x, queries, e, h, decay); });
    store_block<T>(scores, warp, warp, x, lane);
    float by[2] = {gates.before[16 * warp + g], gates.before[16 * warp + g + 8]};
    each_left_block([&](int j, const Block& x) { store_block<T>(scores, warp, j, x, lane); }, gates, qk, by, warp);
  }
  meet<kMakers>();

  // Row `warp` of blocks, the one beside the diagonal first. Only neighbours behind it wait for a block.
  const auto block = [&](Block& sum, int j) {
    Block x = {};
    multiply(x, round_left(sum), diagonal);
    put_transposed<T>(coupling, warp, j, x, lane);
    return round_left(x);
  };
  Block far = {}, farther = {};
  if (warp > 0) {
    Block near = {};
    multiply(near, diagonal_left(common.diagonals, warp - 1, g, q), lower[0]);
    const Left x = block(near, warp - 1);
    if (warp < 3) give(common.inverse[warp - 1], x, lane);
    if (warp > 1) multiply(far, diagonal_left(common.diagonals, warp - 2, g, q), lower[1]);
    if (warp > 2) multiply(farther, diagonal_left(common.diagonals, warp - 3, g, q), lower[2]);
    meet<96, 2>();
  }
  if (warp > 1) {
    multiply(far, get(common.inverse[warp - 2], lane), lower[0]);
    const Left x = block(far, warp - 2);
    if (warp < 3) give(common.inverse[2], x, lane);
    if (warp > 2) multiply(farther, get(common.inverse[0], lane), lower[1]);
    meet<64, 3>();
  }
  if (warp > 2) {
    multiply(farther, get(common.inverse[2], lane), lower[0]);
    block(farther, 0);
  }
}

template <class T>
__device__ __forceinline__ void make(uint8_t* ring, uint8_t* matrices_ring, Common& common, const PrefillParams& p) {
  const int warp = 3 - int(threadIdx.x / 32 % 4), lane = threadIdx.x % 32, thread = threadIdx.x % kMakers, rank = pair_rank();  // warp: the how many-th 16 tokens
  const Unit& unit = wait_unit(common);
  int until = 0;
  int64_t next_page = 0;
  const bool pages = thread == 32 && p.checkpoints.data != nullptr && p.checkpoint_every > 0;
  if (pages) find_boundary(p, unit.sequence, 0, until, next_page);
  uint32_t made = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < unit.chunks; chunk++) {
    const int place = chunk % kMatrices;
    uint8_t *tiles = ring + chunk % kTiles * kTilesBytes, *matrices = matrices_ring + place * kMatricesBytes;
    const int from = unit.sequence.from(chunk), to = unit.sequence.to(chunk);
    int64_t page = -1;
    if (pages && --until == 0) {
      // A boundary counts once the last of its tokens is there: a chunk that is cut short has not reached it.
      const Index& list = checkpoint_rows(p);
      if (to == kChunk) page = list.data != nullptr ? load_index(list, next_page) : next_page;
      next_page++, until = boundary_every(p);
    }
    if (!unit.alone && chunk % 2 != rank) continue;
    wait_keys(common, chunk);
    if (from > 0 || to < kChunk) {
      barrier_wait(&common.values_full[chunk % kTiles], parity_of(chunk, kTiles));
      clean<kMakers>(tiles, from, to, thread);
      fence_async_proxy();
      meet<kMakers>();
    }
    if (p.l2norm) {
#pragma unroll 1
      for (int i = 0; i < 2; i++) normalise_rows<T, T>(tiles + i * kTileBytes, Place(warp), warp, true, common.scales);
      fence_async_proxy();
      meet<kMakers>();
    }
    barrier_wait(&common.gates_full[made % 2], parity_of(made, 2));
    if (chunk >= kMatrices) barrier_wait(&common.used[place], parity_of(chunk - kMatrices, kMatrices));
    make_matrices<T>(matrices, Tiles(ring, chunk % kTiles * kTilesBytes, int(matrices - ring)), common, common.gates[made % 2], p.scale, warp, lane);
    if (thread == 32) *reinterpret_cast<int64_t*>(matrices + kPageIn) = page;
    fence_async_proxy();
    meet<kMakers>();  // and what the makers share is free
    if (thread == 0) {
      barrier_arrive(&common.made[place]);
      barrier_arrive(&common.gates_empty[made % 2]);
      if (!unit.alone) {
        barrier_wait<true>(&common.peer_ready[chunk / 2 % 2], parity_of(chunk / 2, 2));
        bulk_copy_peer(matrices, matrices, kMatricesBytes, &common.made[place]);
      }
    }
    made++;
  }
}

// --- consumers -----------------------------------------------------------------------------------------------------------

// Where this lane's 16-byte pieces of V, and later of the output, are: of row 0 of 16 tokens, 2048 bytes further on each.
__device__ __forceinline__ int v_place(int warp, int lane) {
  const int row = lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
  return kValuesAt + row * 128 + (piece ^ (row & 7)) * 16;
}
__device__ __forceinline__ void load_v(uint32_t (&v)[16], const uint8_t* from) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint32_t tiles[4];
    load_tiles_transposed(tiles, from + reversed_row(16 * j) * 128);
#pragma unroll
    for (int i = 0; i < 4; i++) v[4 * j + i] = tiles[i];
  }
}
__device__ __forceinline__ void put_output(const uint32_t (&o)[16], uint8_t* to) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const uint32_t tiles[4] = {o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]};
    store_tiles_transposed(to + reversed_row(16 * j) * 128, tiles);
  }
}

template <class T>
__device__ __forceinline__ void consume(uint8_t* ring, uint8_t* matrices_ring, Common& common, const PrefillParams& p, int v0) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int v_at = v_place(warp, lane);
  const auto tiles_of = [&](int chunk) { return ring + chunk % kTiles * kTilesBytes; };
  const auto operands = [&](int chunk) { return Tiles(ring, chunk % kTiles * kTilesBytes, kMatricesAt + chunk % kMatrices * kMatricesBytes); };
  const auto wait = [&](int chunk) {
    wait_keys(common, chunk);
    barrier_wait(&common.values_full[chunk % kTiles], parity_of(chunk, kTiles));
    barrier_wait(&common.made[chunk % kMatrices], parity_of(chunk, kMatrices));
  };
  const Unit& unit = wait_unit(common);
  const auto place = [&](const States& states, int64_t row) { return row * states.row + unit.head * states.head + (v0 + 16 * warp) * states.v; };
  float s[16][4] = {}, factor[2] = {1.f, 1.f};
  if (p.initial.data != nullptr && unit.sequence.read >= 0) load_states(s, p.initial, place(p.initial, unit.sequence.read));
  if (unit.chunks > 0) {
    uint32_t operand[32];
    round_state<T>(operand, s, factor);
    float x[8][4], o[8][4];
    uint32_t v[16];
    wait(0);
    begin_x<T>(x, operand, operands(0).k_columns, [](int) {});
    load_v(v, ring + v_at);
    multiply_wait<0>();
    pin(x);
    // A turn of the loop goes from one X to the next, so that no product is under way when it begins.
    for (int chunk = 0, left = unit.chunks; left > 0; chunk++, left--) {
      uint8_t* tiles = tiles_of(chunk);
      const uint8_t* matrices = matrices_ring + chunk % kMatrices * kMatricesBytes;
      const auto* gates = reinterpret_cast<const float*>(matrices + kGatesAt);
      float2 gamma[8];
      load_gates(gamma, gates, kGamma, lane);
      advance<T, T, true>(s, x, o, v, gamma, operand, factor, gates, operands(chunk), lane, [] {});
      round_state<T>(operand, s, factor);
      // The last chunk has no successor: what it multiplies instead is not used.
      const Tiles next = operands(left > 1 ? chunk + 1 : chunk);
      // Products with q and k are done: the makers may be waiting for more of these.
      warp_arrive(&common.keys_freed[chunk % kTiles]);
      if (left > 1) wait(chunk + 1);
      begin_x<T>(x, operand, next.k_columns, [](int) {});
      multiply_wait<1>();
      pin(o);
      uint32_t rounded[16];
      to_operand<T>(rounded, o);
      put_output(rounded, tiles + v_at);
      const int64_t page = *reinterpret_cast<const volatile int64_t*>(matrices + kPageIn);  // here, so that the wait below hides its latency
      fence_async_proxy();
      warp_arrive(&common.values_freed[chunk % kTiles]);
      warp_arrive(&common.used[chunk % kMatrices]);
      if (left > 1) load_v(v, tiles_of(chunk + 1) + v_at);
      multiply_wait<0>();
      pin(x);
      if (page >= 0) store_states(s, p.checkpoints, place(p.checkpoints, page));
    }
  }
  if (p.final.data != nullptr && unit.sequence.write >= 0 && (unit.chunks > 0 || p.copy_empty)) store_states(s, p.final, place(p.final, unit.sequence.write));
}

// Where a unit's tokens lie is known two loads after the kernel has begun. Meanwhile those that would be its first if all sequences had one length come
// to L2; of one sequence, they are. One warp.
__device__ __forceinline__ void prefetch_guess(const PrefillParams& p, const PairPlan& plan, int v0) {
  const int lane = threadIdx.x % 32, unit = int(blockIdx.x / 2), index = unit / p.heads, head = unit - index * p.heads;
  const int64_t token = index * int64_t(uint32_t(p.num_tokens) / uint32_t(p.num_seqs));
  if (elected()) {
    const int head_k = head / p.k_group, head_q = head / p.q_group;
#pragma unroll 1
    for (int row = 0; row < kChunk; row += 16)
#pragma unroll
      for (int column = 0; column < kHead; column += 64) {
        tensor_prefetch(plan.k, column, head_k, int(token) + row);
        tensor_prefetch(plan.q, column, head_q, int(token) + row);
      }
    tensor_prefetch(plan.v, v0, head / p.v_group, int(token));
    const bool known = p.initial.data != nullptr && p.read_rows.data == nullptr && p.pages.indices.data == nullptr;
    if (known && p.initial.dtype == DType::f32 && p.initial.aligned && p.initial.v == kHead)
      bulk_prefetch(static_cast<const float*>(p.initial.data) + index * p.initial.row + head * p.initial.head + v0 * kHead, kRows * kHead * 4);
  }
  const auto prefetch = [&](const void* data, const Strides3& stride, DType dtype) {
    for (int i = lane; i < kChunk && token + i < p.num_tokens; i += 32)
      prefetch_line(static_cast<const char*>(data) + ((token + i) * stride.token + head * stride.head) * (dtype == DType::f32 ? 4 : 2));
  };
  if (p.gate != Gate::none) prefetch(p.g, p.g_stride, p.g_dtype);
  if (p.beta != nullptr) prefetch(p.beta, p.beta_stride, p.beta_dtype);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) pairs(const __grid_constant__ PrefillParams p, const __grid_constant__ PairPlan plan) {
  GDN_SHARED(unaligned);
  uint8_t *ring = align_shared(unaligned, 1024), *matrices = ring + kMatricesAt;
  auto& common = *reinterpret_cast<Common*>(ring + kCommonAt);
  const int v0 = pair_rank() * kRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == kExpecter) prefetch_guess(p, plan, v0);
  if (warp == 0) {
    if (lane < kTiles) {
      barrier_init(&common.keys_full[lane], 1), barrier_init(&common.keys_freed[lane], 4 * kWarpArrivals);
      barrier_init(&common.values_full[lane], 1), barrier_init(&common.values_freed[lane], 4 * kWarpArrivals);
    }
    if (lane < kMatrices) barrier_init(&common.made[lane], 1), barrier_init(&common.used[lane], 4 * kWarpArrivals);
    if (lane < 2) {
      barrier_init(&common.peer_ready[lane], 1);
      barrier_init(&common.gates_full[lane], kWarpArrivals), barrier_init(&common.gates_empty[lane], 1);
    }
    if (lane == 0) barrier_init(&common.found, 1);
    barrier_init_done();
  }
  if (p.zero_rest) zero_rest(p, kHead);  // here, since it brings cu_seqlens for find_unit()
  __syncthreads();
  pair_arrive();  // who reaches into the other CTA's shared memory waits first
  if (warp < kConsumers / 32) {
    registers_up<224>();
    pair_wait();
    consume<T>(ring, matrices, common, p, v0);
  } else if (warp < kBringer) {
    registers_up<176>();
    pair_wait();
    make<T>(ring, matrices, common, p);
  } else {
    registers_down<104>();
    if (warp == kBringer) bring(ring, common, p, plan, v0);
    if (warp == kGateMaker) make_all_gates(common, p);
    if (warp == kFinder && lane == 0) find_unit(common, p);
    __syncwarp();
    pair_wait();
    if (warp == kExpecter) expect<T>(ring, common, p);
    __syncwarp();
  }
  pair_arrive();
  pair_wait();  // neither leaves while the other may reach into its shared memory
}

template <class T>
void launch(const PrefillParams& p, const PairPlan& plan, cudaStream_t stream) {
  static bool allowed[64] = {};  // by device
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= 64 || !allowed[device]) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(pairs<T>), cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
          "cudaFuncSetAttribute");
    if (device < 64) allowed[device] = true;
  }
  GDN_LAUNCH_PAIRS(pairs<T>, 2 * unsigned(p.num_seqs) * unsigned(p.heads), kThreads, kSharedBytes, stream, p, plan);
  check(cudaGetLastError(), "prefill on sm_90a, pairs");
}

}  // namespace

void launch_pairs(const PrefillParams& p, const PairPlan& plan, cudaStream_t stream) { launch<__nv_bfloat16>(p, plan, stream); }

}  // namespace sm90
}  // namespace gdn
#endif
