// Prefill on sm_90a, second kernel: the recurrence over chunks. The mathematics is that of recurrence.cu, but for where beta is (kBetaAtSources), and
// transposed, V rows first, so that S, Y and U are accumulators of one product and left operands of the next in the same registers.
//
//   roles    a warpgroup of 64 V rows keeps its part of the state in registers from the first chunk to the last and does all
//            arithmetic with wgmma; CTAs of two such groups take a whole head, CTAs of one take half. One more warpgroup
//            brings the chunks: q, k, coupling, scores and gates by the copy engine, V by cp.async, several chunks ahead. q and k
//            come straight from the caller's tensors where operands have their type, and else as tiles that the first kernel left.
//   order    groups of 16 tokens are reversed in tiles of k and q, and so in all that is multiplied with these: sm90_workspace.cuh says why.
//   hand-over  two barriers a stage: `full` when everything has landed, `empty` when all consumers are done with it.
//   units    a CTA stays on its multiprocessor and takes one unit of work after another: the loads of the next begin while the
//            last chunks of one are computed. The first warp of the producers says what comes next.
//   output   goes back through the stage's own V tile and is stored by the producers, before they fill the stage again: with
//            the consumers doing so, a quarter of their time was spent on waiting for these stores.
//   states   come and go through a stage too (Plan::staged): each unit but a CTA's first begins with a stage that holds the state it
//            starts from, brought ahead as chunks are, in which the consumers leave the state of the unit before.
//
// Split sequences (sm90_launch.cu) use the same code twice: the first pass has no output and starts from nothing or, for the
// transition, from the identity with V = 0; the second starts each segment from the state that the scan found.
#include "../common/device.h"
#include "sequence.cuh"
#include "sm90_state_steps.cuh"
#include "states.cuh"

#if GDN_SM90
namespace gdn {
namespace sm90 {
namespace {

constexpr int kProducers = 128, kCarriers = 96;
template <int kGroups>
constexpr int kThreads = 128 * kGroups + kProducers;
template <int kGroups>
constexpr int kStages = kGroups == 1 ? 4 : 3;  // as many as shared memory holds

// Shared memory of one stage; a segment's start is a multiple of 1024.
template <int kGroups>
struct Stage {
  static constexpr int v_row_bytes = 128 * kGroups + 16;  // so that eight rows' pieces lie in different banks
  static constexpr int k = kKeysAt, q = kQueriesAt, record = kRecordAt, gates = record + kGatesAt;
  static constexpr int v = record + kRecordBytes;

  // Of a stage that holds a state instead, float32 [64 kGroups, 128]: rows lie apart, so that they begin in different banks.
  static constexpr int state_row = kHead * 4 + 32;
  static constexpr int of_chunk = v + kChunk * v_row_bytes, of_state = 64 * kGroups * state_row;
  static constexpr int bytes = ((of_chunk > of_state ? of_chunk : of_state) + 1023) / 1024 * 1024;
};

// Chunks [begin, end) of a sequence, for one head and its V rows from `v0` on.
struct Work {
  int index, head, v0;
  bool first, last;  // of the sequence's segments
  bool transition;   // of the first pass: the segment's transition, from the identity and with V = 0
  int64_t begin, end, segment;
};
// What a CTA does next.
struct alignas(16) Unit {
  Work work;
  Sequence sequence;
  bool end;  // nothing
};
static_assert(sizeof(Unit) % 128 != 0, "lanes' drafts begin in different banks");
constexpr int kUnits = 4;  // that a CTA knows of at a time; each thread says itself that it has written or read one
constexpr int kShort = 8;  // chunks of a unit that does not last much longer than it takes to find the next

// A number that the compiler takes for a new one, so that it keeps nothing that is calculated from it in registers from turn to turn.
__device__ __forceinline__ int unhoisted(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// What the consumers leave in a stage: the outputs of a chunk, and where a thread's piece of row 0 goes; or a state, and where it
// goes, if anywhere.
struct Left {
  void* to;
  int rows;  // from + 256 to, for want of registers
};

// Behind the stages.
template <int kGroups>
struct Common {
  uint64_t full[kStages<kGroups>], empty[kStages<kGroups>], exchanged[kStages<kGroups>], unit_full[kUnits], unit_empty[kUnits];
  Unit units[kUnits];
  Left left[kStages<kGroups> * kCarriers];  // each thread its own
  // Of each stage, the row for the state behind its chunk, negative if it goes nowhere: no page or interval of checkpoints ends there, or
  // the list says so. As wide as the list's entries.
  int64_t page[kStages<kGroups>];
  int64_t next_page;  // of the list, the entry for the next
  // What each lane of the warp that deals finds, all the same: registers are short there, and one copy would be a race.
  Unit drafts[32];
};

template <int kGroups>
constexpr int shared_bytes() {
  return 1024 + kStages<kGroups> * Stage<kGroups>::bytes + int(sizeof(Common<kGroups>));
}
static_assert(shared_bytes<1>() <= 227 << 10 && shared_bytes<2>() <= 227 << 10, "shared memory of a multiprocessor");

// The chunks of the segment in a slot. Segments are counted from the sequence's first chunk in this call.
__device__ __forceinline__ bool find_segment(const PrefillParams& p, const Plan& plan, int64_t slot, Work& work, Sequence& sequence) {
  const int64_t tokens = int64_t(plan.path.segment) * kChunk;
  const int index = find_sequence(p, slot, tokens);
  work.index = index, work.first = work.last = false;
  if (index < 0) return false;
  sequence = get_sequence(p, index);
  const int64_t number = slot - sequence.slot(index, tokens);
  const int64_t count = (sequence.chunks + plan.path.segment - 1) / plan.path.segment;
  work.segment = slot;
  if (number >= (sequence.chunks > 0 ? count : 1)) return false;
  work.first = number == 0, work.last = sequence.chunks == 0 || number == count - 1;
  work.begin = number * plan.path.segment;
  const int64_t end = work.begin + plan.path.segment;
  work.end = end < sequence.chunks ? end : sequence.chunks;
  return true;
}

// Where 16-byte piece c of row t of the V tile lies.
template <int kGroups>
__device__ __forceinline__ int v_at(int t, int c) {
  return t * Stage<kGroups>::v_row_bytes + c * 16;
}

// Rows [from, to) of chunk c of a sequence are tokens.
struct Rows {
  int from, to;
};

// What a thread carries of a chunk's rows: piece `c`, of every kRows-th row from `first` on.
template <int kGroups>
struct Share {
  static constexpr int kPieces = 8 * kGroups, kRows = kCarriers / kPieces, kTimes = (kChunk + kRows - 1) / kRows;
  int c, first;

  __device__ __forceinline__ explicit Share(int thread) : c(thread % kPieces), first(thread / kPieces) {}
};

// V rows; those that are no tokens become zeros. `v` is the share's piece of row 0.
template <int kGroups>
__device__ __forceinline__ void copy_v(uint8_t* tile, const PrefillParams& p, const Rows& rows, const uint16_t* v, const Share<kGroups>& share) {
  using Mine = Share<kGroups>;
  uint8_t* to = tile + v_at<kGroups>(share.first, share.c);
  const uint16_t* from = v + share.first * p.v_stride.token;
  const int64_t step = Mine::kRows * p.v_stride.token;
  if (p.v_aligned && rows.from == 0 && rows.to == kChunk) {
#pragma unroll
    for (int i = 0; i < Mine::kTimes; i++, from += step)
      if ((i + 1) * Mine::kRows <= kChunk || share.first + i * Mine::kRows < kChunk) copy_async(to + v_at<kGroups>(i * Mine::kRows, 0), from, true);
    return;
  }
#pragma unroll 1
  for (int t = share.first; t < kChunk; t += Mine::kRows, to += v_at<kGroups>(Mine::kRows, 0), from += step) {
    const bool valid = t >= rows.from && t < rows.to;
    const uint16_t* row = valid ? from : static_cast<const uint16_t*>(p.v);
    if (p.v_aligned) {
      copy_async(to, row, valid);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) reinterpret_cast<uint16_t*>(to)[j] = valid ? row[j] : uint16_t(0);
    }
  }
}

// A chunk's outputs, from the V tile that the consumers left them in: a thread reads what it then overwrites with V. `output` is
// the share's piece of row 0.
template <int kGroups>
__device__ __forceinline__ void store_output(const uint8_t* tile, const Rows& rows, uint16_t* output, int64_t stride, bool aligned, const Share<kGroups>& share) {
  using Mine = Share<kGroups>;
  const uint8_t* from = tile + v_at<kGroups>(share.first, share.c);
  uint16_t* to = output + share.first * stride;
  const int64_t step = Mine::kRows * stride;
  if (aligned && rows.from == 0 && rows.to == kChunk) {
    constexpr int kBatch = 4;
#pragma unroll
    for (int i = 0; i < Mine::kTimes; i += kBatch) {
      uint4 values[kBatch];
      // The tile's last rows may be none of this thread's.
      const auto mine = [&](int time) { return (time + 1) * Mine::kRows <= kChunk || (time < Mine::kTimes && share.first + time * Mine::kRows < kChunk); };
#pragma unroll
      for (int j = 0; j < kBatch; j++)
        if (mine(i + j)) values[j] = *reinterpret_cast<const uint4*>(from + v_at<kGroups>((i + j) * Mine::kRows, 0));
#pragma unroll
      for (int j = 0; j < kBatch; j++, to += step)
        if (mine(i + j)) store_global(to, values[j]);
    }
    return;
  }
#pragma unroll 1
  for (int t = share.first; t < rows.to; t += Mine::kRows, from += v_at<kGroups>(Mine::kRows, 0), to += step) {
    if (t < rows.from) continue;
    const uint4 value = *reinterpret_cast<const uint4*>(from);
    if (aligned) {
      store_global(to, value);
    } else {
      const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (int e = 0; e < 8; e++) to[e] = uint16_t(words[e / 2] >> (16 * (e % 2)));
    }
  }
}

// The first pass takes whole heads, and the long units first, so that none of them is begun when the others end: numbers go three times through
// all segments and heads.
enum FirstPass { kTransitions, kLongRows, kShortRows, kTurns };
__device__ __forceinline__ uint32_t numbers_a_turn(const Plan& plan) { return uint32_t(plan.segments) * uint32_t(plan.heads); }

// The unit of a number: segment or sequence, head of the pass, share of its V rows, the last fastest. False if there is nothing to do. A warp together.
template <int kGroups, bool kOutput>
__device__ __forceinline__ bool find_unit(const PrefillParams& p, const Plan& plan, uint32_t number, Work& work, Sequence& sequence) {
  static_assert(kOutput || kGroups == 2);
  constexpr uint32_t kShares = 2 / kGroups;
  work.transition = !kOutput && number < numbers_a_turn(plan);
  if (!kOutput) number %= numbers_a_turn(plan);
  const int64_t which = number / kShares / uint32_t(plan.heads);
  work.head = plan.first_head + number / kShares % uint32_t(plan.heads);
  work.v0 = number % kShares * 64 * kGroups;
  if (plan.path.segment > 0) {
    if (!find_segment(p, plan, which, work, sequence)) return false;
  } else {
    sequence = get_sequence(p, int(which));
    work.index = int(which), work.begin = 0, work.end = sequence.chunks, work.segment = 0, work.first = work.last = true;
  }
  if (kOutput) return sequence.chunks > 0 || p.copy_empty;
  // Nothing starts from where the last segment ends; the first starts from the true state.
  return !work.last && !(work.transition && work.first);
}

// Of a number that is no unit's: one further on before which none is. A warp together.
template <int kGroups, bool kOutput>
__device__ __forceinline__ uint32_t first_behind(const PrefillParams& p, const Plan& plan, uint32_t number, const Work& work) {
  if constexpr (kOutput) {
    const uint32_t slot = uint32_t(plan.heads) * (2 / kGroups);
    return (number / slot + 1) * slot;
  } else {
    const uint32_t turn = number / numbers_a_turn(plan) * numbers_a_turn(plan), heads = uint32_t(plan.heads);
    // The first segment has no transition, but those behind may.
    if (work.index >= 0 && work.transition && work.first && !work.last) return (number / heads + 1) * heads;
    // All segments behind have nothing to do, up to the next sequence that is split.
    const int behind = work.index + 1;
    const unsigned split = __ballot_sync(0xffffffffu, is_split(p, int64_t(behind) + threadIdx.x % 32, plan.path.segment));
    const int64_t next = behind + (split != 0 ? __ffs(int(split)) - 1 : 32);
    const int64_t slot = next < p.num_seqs ? get_sequence(p, int(next)).slot(int(next), int64_t(plan.path.segment) * kChunk) : plan.segments;
    return turn + uint32_t(slot) * heads;
  }
}

// The last chunk of a segment from which to its end the transition cannot be told from zero, its norm being below the least
// float32 even after what keys longer than 1 may have made grow before; or the chunk before the segment if there is none. What
// lies before that chunk is forgotten at the segment's end. A warp together.
__device__ __forceinline__ int64_t forgotten_before(const Plan& plan, const Sequence& sequence, const Work& work) {
  const int lane = threadIdx.x % 32;
  const auto bound_of = [&](int64_t c) {
    if (c < work.begin) return 0.f;
    return reinterpret_cast<const float*>(plan.record(sequence.slot(work.index) + c, work.head) + kGatesAt)[kBoundAt];
  };
  float sum = 0.f;
  for (int64_t c = work.end - 1 - lane; c >= work.begin; c -= 32) sum += fmaxf(bound_of(c), 0.f);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  for (int64_t last = work.end - 1; last >= work.begin; last -= 32) {
    float bound = bound_of(last - lane);
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float behind = __shfl_up_sync(0xffffffffu, bound, offset);
      if (lane >= offset) bound += behind;
    }
    bound += sum;
    const unsigned small = __ballot_sync(0xffffffffu, last - lane >= work.begin && bound < -160.f);
    if (small != 0) return last - (__ffs(int(small)) - 1);
    sum = __shfl_sync(0xffffffffu, bound, 31);
  }
  return work.begin - 1;
}

// What comes next, into the warp's drafts: units are dealt out as CTAs become free, so that long and short sequences mix; a CTA asks
// for the number of its next one no sooner. A warp together.
template <int kGroups, bool kOutput>
__device__ __forceinline__ void draft(Common<kGroups>& common, const PrefillParams& p, const Plan& plan, uint32_t count, uint32_t turn) {
  const int lane = threadIdx.x % 32;
  Unit& unit = common.drafts[lane];
  uint32_t next = blockIdx.x;
  bool ask = turn > 0;
  for (bool dealt = false; !dealt; ask = true) {
    if (ask) {
      wait_for_previous();  // the first kernel sets the counter to 0
      const uint32_t more = lane == 0 ? atomicAdd(&plan.dealt[kOutput], 1u) : 0u;
      next = gridDim.x + __shfl_sync(0xffffffffu, more, 0);
    }
    const bool end = next >= count;
    dealt = end || find_unit<kGroups, kOutput>(p, plan, next, unit.work, unit.sequence);
    if (!dealt && plan.path.segment > 0) {  // nor have the others of this slot anything to do
      const uint32_t first = first_behind<kGroups, kOutput>(p, plan, next, unit.work);
      if (lane == 0 && first > gridDim.x) atomicMax(&plan.dealt[kOutput], first - gridDim.x);
    }
    if (!kOutput && dealt && !end) {
      Work& work = unit.work;
      int64_t begin = work.begin - 1;
      if (!work.first) {
        wait_for_previous();
        begin = forgotten_before(plan, unit.sequence, work);
      }
      if (work.transition) {
        dealt = begin < work.begin;
        if (lane == 0) plan.nonzero[work.segment * plan.heads + work.head - plan.first_head] = dealt;
      } else {
        if (begin > work.begin) work.begin = begin;
        const bool is_long = 2 * (work.end - work.begin) > plan.path.segment;
        dealt = is_long == (next / numbers_a_turn(plan) == kLongRows);
      }
    }
    unit.end = end;
    if (!(kOutput && plan.staged) && lane == 0 && dealt && !end && unit.work.first && unit.sequence.read >= 0 && p.initial.aligned && p.initial.v == kHead) {
      // Its state is wanted when the unit before is done: from L2 it comes sooner.
      const int size = p.initial.dtype == DType::f32 ? 4 : p.initial.dtype == DType::bf16 || p.initial.dtype == DType::f16 ? 2 : 1;
      const int64_t row = unit.sequence.read * p.initial.row + unit.work.head * p.initial.head + unit.work.v0 * p.initial.v;
      if (p.initial.data != nullptr) bulk_prefetch(static_cast<const char*>(p.initial.data) + row * size, 64 * kGroups * kHead * size);
    }
  }
}

// Tells the others.
template <int kGroups>
__device__ __forceinline__ void deal(Common<kGroups>& common, uint32_t turn) {
  const int lane = threadIdx.x % 32;
  barrier_wait(&common.unit_empty[turn % kUnits], turn / kUnits % 2 ^ 1);
  __syncwarp();
  auto* to = reinterpret_cast<uint4*>(&common.units[turn % kUnits]);
  const auto* from = reinterpret_cast<const uint4*>(&common.drafts[0]);
  for (int i = lane; i < int(sizeof(Unit) / 16); i += 32) to[i] = from[i];
  barrier_arrive(&common.unit_full[turn % kUnits]);
}

// Deals, and brings each chunk's tiles, matrices and gates into the next stage that is free, by copies that one lane asks for: by several they take
// longer (elected()). The tiles may be boxes of the caller's tensors, of 16 tokens each, since groups of these are reversed (Plan::raw), but for
// chunks that are cut short: a box would bring neighbours' tokens too.
template <class T, class M, int kGroups, bool kOutput>
__device__ __forceinline__ void bring(uint8_t* stages, Common<kGroups>& common, const PrefillParams& p, const Plan& plan, uint32_t units) {
  using S = Stage<kGroups>;
  constexpr int kAll = (kTileBytes + kTriangleBytes) * (kOutput ? 2 : 1) + kGateBytes<M>;
  const int lane = threadIdx.x % 32;
  const bool raw = std::is_same_v<T, M> && plan.raw;
  uint32_t filled = 0;
  int chunks = 0, index = 0;
  // Of the next chunk: where its record and its tiles of k and q are, in pieces of 16 bytes of the workspace for want of registers, and how far on the next
  // tiles; or its first token, and the heads.
  uint32_t record = 0, k = 0, q = 0, k_step = 0, q_step = 0;
  bool cut_first = false, cut_last = false;  // raw: whether the next chunk, or the unit's last, has rows that are no tokens
  for (uint32_t turn = 0;; turn++) {
    // The first unit, or, now that stages are full and there is time, the one after that at hand.
    draft<kGroups, kOutput>(common, p, plan, units, turn);
    deal<kGroups>(common, turn);
    // What is left of the unit before, and what this one begins with.
#pragma unroll 1
    for (int part = turn > 0 ? 0 : 1; part < 2; part++) {
      int count = chunks;
      if (part == 1) {
        if (turn > 0) barrier_arrive(&common.unit_empty[(turn - 1) % kUnits]);
        barrier_wait(&common.unit_full[turn % kUnits], turn / kUnits % 2);
        const Unit& unit = common.units[turn % kUnits];
        if (unit.end) return;
        const Work& work = unit.work;
        index = work.index;
        const int64_t slot = unit.sequence.slot(work.index) + work.begin;
        record = uint32_t((plan.record(slot, work.head) - plan.records) / 16);
        const int head_k = work.head / p.k_group, head_q = work.head / p.q_group;
        if (raw) {
          k = uint32_t(unit.sequence.first_token(work.begin)), k_step = head_k, q_step = head_q;
        } else {
          const int heads_k = p.heads / p.k_group, heads_q = p.heads / p.q_group;
          constexpr uint32_t kPieces = kTileBytes / 16;
          k = uint32_t((plan.k_tiles - plan.records) / 16) + uint32_t(slot * heads_k + head_k) * kPieces, k_step = heads_k * kPieces;
          q = uint32_t((plan.q_tiles - plan.records) / 16) + uint32_t(slot * heads_q + head_q) * kPieces, q_step = heads_q * kPieces;
        }
        // The same for all lanes, as the compiler sees now.
        const auto uniform = [](auto& x) { x = __shfl_sync(0xffffffffu, x, 0); };
        uniform(record), uniform(k), uniform(q), uniform(k_step), uniform(q_step);
        chunks = int(work.end - work.begin);
        uniform(chunks), uniform(index);
        if (raw) cut_first = unit.sequence.from(work.begin) > 0, cut_last = unit.sequence.to(work.end - 1) < kChunk;
        if (kOutput && plan.staged && turn > 0) {  // the stage of the state, which others bring
          uint64_t* full = &common.full[filled % kStages<kGroups>];
          barrier_wait(&common.empty[filled % kStages<kGroups>], filled / kStages<kGroups> % 2 ^ 1);
          __syncwarp();  // or a lane that has not seen this phase yet might miss it: the stage can come and go without this warp
          filled++;
          if (lane == 0) barrier_arrive(full);
        }
        if (turn == 0) wait_for_previous();  // V and the state come meanwhile
        // A unit is taken late, or it would wait behind a long one while others go idle; but of short ones the next is wanted soon.
        count = chunks > kShort ? chunks - 2 : chunks < kStages<kGroups> ? chunks : kStages<kGroups>;
      }
      for (; count > 0; count--, chunks--, filled++) {
        const uint32_t number = filled % kStages<kGroups>;
        uint64_t* full = &common.full[number];
        barrier_wait(&common.empty[number], filled / kStages<kGroups> % 2 ^ 1);
        const bool in_front = cut_first, cut = raw && (in_front || (cut_last && chunks == 1));
        cut_first = false;
        __syncwarp();
        uint8_t* stage = stages + number * S::bytes;
        const auto at = [&](uint32_t place) { return plan.records + int64_t(place) * 16; };
        if (elected()) {
          barrier_arrive_expect(full, kAll);
          bulk_copy(stage + S::record, at(record), kGatesAt + kGateBytes<M>, full);
          if (kOutput) bulk_copy(stage + S::record + kScoresAt, at(record) + kScoresAt, kTriangleBytes, full);
          if (raw && !cut) {
            copy_tiles<kOutput>(stage, plan.groups[0], plan.groups[1], int(k_step), int(q_step), int(k), full);
          } else {
            const int64_t tile = cut ? Plan::cut_tile(index, in_front) : 0;
            bulk_copy(stage + S::k, cut ? plan.k_tiles + (tile * (p.heads / p.k_group) + k_step) * kTileBytes : at(k), kTileBytes, full);
            if (kOutput) bulk_copy(stage + S::q, cut ? plan.q_tiles + (tile * (p.heads / p.q_group) + q_step) * kTileBytes : at(q), kTileBytes, full);
          }
        }
        record += plan.heads * uint32_t(kRecordBytes / 16);
        raw ? k += kChunk : (k += k_step, q += q_step);
      }
    }
  }
}

// The state that a unit starts from into its stage. The carriers together, a row a warp.
template <int kGroups>
__device__ __forceinline__ void bring_state(uint8_t* stage, uint64_t* full, const PrefillParams& p, const Plan& plan, const Unit& unit) {
  const int thread = threadIdx.x - 128 * kGroups - 32, lane = thread % 32;
  const Work& work = unit.work;
  const float* from = nullptr;
  int64_t step = kHead;
  if (!work.first || !work.last) {
    from = plan.segment_state(work.segment, work.head, work.first) + work.v0 * kHead;  // consume() says what it holds
    if (work.first && (p.initial.data == nullptr || unit.sequence.read < 0)) from = nullptr;
  } else if (p.initial.data != nullptr && unit.sequence.read >= 0) {
    from = static_cast<const float*>(p.initial.data) + unit.sequence.read * p.initial.row + work.head * p.initial.head + work.v0 * p.initial.v;
    step = p.initial.v;
  }
  if (from == nullptr) {
    barrier_arrive(full);
    return;
  }
  meet<kCarriers>();  // all have stored the outputs that were there
  from += thread / 32 * step + lane * 4;
  uint8_t* to = stage + thread / 32 * Stage<kGroups>::state_row + lane * 16;
#pragma unroll 2
  for (int row = thread / 32; row < 64 * kGroups; row += kCarriers / 32, from += kCarriers / 32 * step, to += kCarriers / 32 * Stage<kGroups>::state_row)
    copy_async(to, from, true);
  barrier_arrive_copies(full);
}

// The state that the consumers left, if it goes anywhere. The carriers together, a row a warp; then the stage is free.
template <int kGroups>
__device__ __forceinline__ void take_state(uint8_t* stage, uint64_t* empty, float* state, int64_t step) {
  const int thread = threadIdx.x - 128 * kGroups - 32, lane = thread % 32;
  if (state != nullptr) {
    float* to = state + thread / 32 * step + lane * 4;
#pragma unroll 2
    for (int row = thread / 32; row < 64 * kGroups; row += kCarriers / 32, to += kCarriers / 32 * step)
      store_global(to, *reinterpret_cast<const uint4*>(stage + row * Stage<kGroups>::state_row + lane * 16));
  }
  fence_async_proxy();
  meet<kCarriers>();
  for (int i = thread; i < 4 * kGroups * kWarpArrivals; i += kCarriers) barrier_arrive(empty);  // for the consumers
}

// Carries V, or a state, into each stage, once what the consumers left there is out.
template <int kGroups, bool kOutput>
__device__ __forceinline__ void carry(uint8_t* stages, Common<kGroups>& common, const PrefillParams& p, const Plan& plan) {
  using S = Stage<kGroups>;
  const Share<kGroups> share(threadIdx.x - 128 * kGroups - 32);
  if (plan.path.segment > 0) wait_for_previous();  // for the states
  int number = 0, parity = 1;
  uint32_t exchanged = 0;  // parities
  constexpr int kState = -1;  // as rows of what is left
  Left* left = common.left + threadIdx.x - 128 * kGroups - 32;  // of stage 0; kCarriers further on of the next
  for (int i = 0; i < kStages<kGroups>; i++) left[i * kCarriers].rows = 0;
  const auto next_stage = [&](const Left& mine) {
    uint8_t* stage = stages + number * S::bytes;
    const Left was = left[number * kCarriers];
    left[number * kCarriers] = mine;
    if (kOutput && was.rows == kState) {
      barrier_wait(&common.exchanged[number], exchanged >> number & 1);
      exchanged ^= 1u << number;
      take_state<kGroups>(stage, &common.empty[number], static_cast<float*>(was.to), p.final.v);
    } else {
      barrier_wait(&common.empty[number], parity);
      if (kOutput && was.rows > 0)
        store_output(stage + S::v, {was.rows % 256, was.rows / 256}, static_cast<uint16_t*>(was.to), p.output_stride.token, plan.output_aligned, share);
    }
  };
  bool any = false;  // units before
  for (int place = 0, unit_parity = 0;;) {
    barrier_wait(&common.unit_full[place], unit_parity);
    const Unit& unit = common.units[place];
    if (unit.end) break;
    const Work& work = unit.work;
    const bool with_v = !work.transition;
    const int64_t token = unit.sequence.first_token(work.begin);
    const int column = work.v0 + share.c * 8;
    const uint16_t* v = static_cast<const uint16_t*>(p.v) + work.head / p.v_group * p.v_stride.head + token * p.v_stride.token + column;
    uint16_t* output = static_cast<uint16_t*>(p.output) + work.head * p.output_stride.head + token * p.output_stride.token + column;
    const int chunks = int(work.end - work.begin), last_row = work.last && chunks > 0 ? unit.sequence.to(work.end - 1) : kChunk;
    Rows rows{unit.sequence.from(work.begin), kChunk};
    // One thread brings the rows of checkpoints too.
    const bool pages = kOutput && threadIdx.x == 128 * kGroups + 32;
    int until = 0;
    if (pages && p.checkpoints.data != nullptr && p.checkpoint_every > 0) find_boundary(p, unit.sequence, work.begin, until, common.next_page);
    if (kOutput && plan.staged && any) {
      const Unit& before = common.units[(place + kUnits - 1) % kUnits];
      const int64_t write = before.sequence.write;
      const bool leaves = before.work.last && p.final.data != nullptr && write >= 0;
      float* to = static_cast<float*>(p.final.data) + write * p.final.row + before.work.head * p.final.head + before.work.v0 * p.final.v;
      next_stage({leaves ? to : nullptr, kState});
      bring_state<kGroups>(stages + number * S::bytes, &common.full[number], p, plan, unit);
      if (++number == kStages<kGroups>) number = 0, parity ^= 1;
    }
    if (any) barrier_arrive(&common.unit_empty[(place + kUnits - 1) % kUnits]);
    any = true;
    if (++place == kUnits) place = 0, unit_parity ^= 1;
    for (int chunk = 0; chunk < chunks; chunk++) {
      if (chunk == chunks - 1) rows.to = last_row;
      next_stage({output, rows.from + 256 * rows.to});
      uint64_t* full = &common.full[number];
      if (pages) {
        int64_t& page = common.page[number];
        page = -1;
        if (--until == 0) {
          // A boundary counts once the last of its tokens is there: a chunk that is cut short has not reached it.
          const Index& list = checkpoint_rows(p);
          if (rows.to == kChunk && list.data == nullptr) page = common.next_page;
          if (rows.to == kChunk && list.data != nullptr) copy_index(&page, static_cast<const char*>(list.data) + common.next_page * (list.wide ? 8 : 4), list.wide);
          if (!p.v_aligned) copy_commit(), copy_wait<0>();
          common.next_page++, until = boundary_every(p);
        }
      }
      if (with_v) {
        copy_v(stages + number * S::bytes + S::v, p, rows, v, share);
        p.v_aligned ? barrier_arrive_copies(full) : barrier_arrive(full);
      } else {
        barrier_arrive(full);
      }
      v += kChunk * p.v_stride.token, output += kChunk * p.output_stride.token;
      rows.from = 0;
      if (++number == kStages<kGroups>) number = 0, parity ^= 1;
    }
  }
  if constexpr (kOutput) {
    for (int i = 0; i < kStages<kGroups>; i++) {
      next_stage({});
      if (++number == kStages<kGroups>) number = 0, parity ^= 1;
    }
  }
}

// Where a lane's 16-byte pieces of V, and later of the output, are: of row 0 of the 16 tokens j, so many rows further on each.
template <int kGroups>
__device__ __forceinline__ int v_place(int warp, int lane) {
  return Stage<kGroups>::v + v_at<kGroups>(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
}
// V^T as accumulators are, two tokens a word. A V of zeros is not read.
template <int kGroups>
__device__ __forceinline__ void load_v(uint32_t (&v)[16], const uint8_t* from, bool with_v) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint32_t tiles[4] = {0, 0, 0, 0};
    if (with_v) load_tiles_transposed(tiles, from + v_at<kGroups>(reversed_row(16 * j), 0));
#pragma unroll
    for (int i = 0; i < 4; i++) v[4 * j + i] = tiles[i];
  }
}

// A chunk's outputs, O^T rounded, into the stage's V tile: a warp has read its columns of V when it has outputs, and no other
// consumer reads or writes them.
template <int kGroups>
__device__ __forceinline__ void put_output(const uint32_t (&o)[16], uint8_t* to) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const uint32_t tiles[4] = {o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]};
    store_tiles_transposed(to + v_at<kGroups>(reversed_row(16 * j), 0), tiles);
  }
}

__device__ __forceinline__ States segment_states(const Plan& plan) {
  return {plan.states, 0, 0, kHead, DType::f32, true};
}

// A warp's 16 rows of a transition, from `row` on, as the scan wants them.
__device__ __forceinline__ void store_transition(const float (&s)[16][4], float* slot, int row, int lane) {
  auto* to = reinterpret_cast<uint8_t*>(slot);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float most = 0.f;
#pragma unroll
    for (int n = 0; n < 16; n++) most = fmaxf(most, fmaxf(fabsf(s[n][2 * i]), fabsf(s[n][2 * i + 1])));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    // Of which the inverse is a number too.
    uint32_t exponent = __float_as_uint(most) >> 23;
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    const float inverse = __uint_as_float((254 - exponent) << 23);
    const int mine = row + lane / 4 + 8 * i;
    uint8_t* pieces = to + Transition::piece(mine, lane % 4);
#pragma unroll
    for (int n = 0; n < 16; n += 2)
      *reinterpret_cast<uint2*>(pieces + Transition::piece(0, 2 * n)) = make_uint2(Pair<__half>::pack(s[n][2 * i] * inverse, s[n][2 * i + 1] * inverse),
                                                                             Pair<__half>::pack(s[n + 1][2 * i] * inverse, s[n + 1][2 * i + 1] * inverse));
    if (lane % 4 == 0) reinterpret_cast<float*>(to + Transition::factors_at)[mine] = __uint_as_float(exponent << 23);
  }
}

// A warp's 16 rows in the stage of a state: what came becomes the state, and what the state was takes its place if it leaves.
__device__ __forceinline__ void exchange(float (&s)[16][4], uint8_t* rows, int row_bytes, bool comes, bool leaves, int lane) {
  uint8_t* mine = rows + lane / 4 * row_bytes + lane % 4 * 8;
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      auto& cell = *reinterpret_cast<float2*>(mine + 8 * i * row_bytes + 32 * n);
      const float2 next = comes ? cell : make_float2(0.f, 0.f);
      if (leaves) cell = make_float2(s[n][2 * i], s[n][2 * i + 1]);
      s[n][2 * i] = next.x, s[n][2 * i + 1] = next.y;
    }
}

// The consumers' way through their chunks, with everything that becomes of the state.
template <class T, class M, int kGroups, bool kOutput>
__device__ __forceinline__ void consume(uint8_t* stages, Common<kGroups>& common, const PrefillParams& p, const Plan& plan) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  using S = Stage<kGroups>;
  constexpr bool kRoomy = kGroups == 1;  // with registers for what the next chunk begins with
  const int v_of_lane = unhoisted(v_place<kGroups>(warp, lane));  // kept, not calculated again
  const bool wide = checkpoint_rows(p).wide;
  uint32_t units_done = 0;
  // Of the ring of stages, the next, and the parity of its barriers.
  int number = 0, parity = 0;
  const auto step = [&] {
    if (++number == kStages<kGroups>) number = 0, parity ^= 1;
  };
  // The state, and what its rows were multiplied with (kBounded).
  float s[16][4], factor[2] = {1.f, 1.f};
  // Where this warp's rows of head and row begin.
  const auto place = [&](const States& states, const Work& work, int64_t row) {
    return row * states.row + work.head * states.head + (work.v0 + 16 * unhoisted(warp)) * states.v;
  };
  const auto segment_place = [&](const Work& work, int which) {
    return plan.segment_state(work.segment, work.head, which) - plan.states + (work.v0 + 16 * unhoisted(warp)) * kHead;
  };
  const auto true_values = [&] {
    if (kBounded<M>) {
      const float back[2] = {1.f / factor[0], 1.f / factor[1]};
      multiply_rows(s, back);
    }
  };
  for (;; units_done++) {
    const uint32_t unit_place = units_done % kUnits, place_before = (units_done + kUnits - 1) % kUnits;
    barrier_wait(&common.unit_full[unit_place], units_done / kUnits % 2);
    const Work& work = common.units[unit_place].work;
    const Sequence& sequence = common.units[unit_place].sequence;
    // The first state comes straight to registers: nothing has to leave, and all stages are for chunks.
    const bool end = common.units[unit_place].end, staged = kOutput && plan.staged && !end && units_done > 0;
    if (kOutput && units_done == 0 && (end || plan.path.segment > 0)) wait_for_previous();
    // What becomes of the state of the unit before.
    const Work& before = common.units[place_before].work;
    const int64_t write = common.units[place_before].sequence.write;
    const bool leaves = units_done > 0 && (!kOutput || (before.last && p.final.data != nullptr && write >= 0));
    if (leaves) {
      true_values();
      if (kOutput && !staged) store_states(s, p.final, place(p.final, before, write));
      if (!kOutput && before.transition) store_transition(s, plan.segment_state(before.segment, before.head, 1), before.v0 + 16 * unhoisted(warp), lane);
      if (!kOutput && !before.transition) store_states(s, segment_states(plan), segment_place(before, 0));
    }
    if (end) break;
    const bool transition = !kOutput && work.transition;
    if (staged) {
      const bool comes = !work.first || (p.initial.data != nullptr && sequence.read >= 0);
      uint8_t* rows = stages + number * S::bytes + 16 * unhoisted(warp) * S::state_row;
      barrier_wait(&common.full[number], parity);
      exchange(s, rows, S::state_row, comes, leaves, lane);
      warp_arrive(&common.exchanged[number]);
      step();
    } else {
      // Zeros, or of the identity this lane's rows: where tile 0's column 0 would be counted from the diagonal.
      const int diagonal = unhoisted(transition ? work.v0 + 16 * warp + lane / 4 - 2 * (lane % 4) : -kHead);
#pragma unroll
      for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = 8 * n + i % 2 - i / 2 * 8 == diagonal ? 1.f : 0.f;
      if (transition) {
      } else if (work.first) {
        // The final state may replace the initial one. So the first pass, which reads that, leaves a copy in place of the
        // transition that a first segment does not have, for the second pass, whose last segments may end early.
        if (p.initial.data != nullptr && sequence.read >= 0) {
          if (kOutput && !work.last) {
            load_states(s, segment_states(plan), segment_place(work, 1));
          } else {
            load_states(s, p.initial, place(p.initial, work, sequence.read));
            if (!kOutput) store_states(s, segment_states(plan), segment_place(work, 1));
          }
        }
      } else if (kOutput) {
        load_states(s, segment_states(plan), segment_place(work, 0));
      }
    }
    if (units_done > 0)
      barrier_arrive(&common.unit_empty[place_before]);
    else if (kOutput && plan.path.segment == 0)
      wait_for_previous();
    uint32_t operand[32];
    factor[0] = factor[1] = 1.f;
    round_state<M>(operand, s, factor);

    int left = int(work.end - work.begin);
    float x[8][4], o[8][4];
    uint32_t v[16];
    float2 gamma[8];
    const auto load_gamma = [&](const uint8_t* stage) {
      if constexpr (kBetaAtSources<M>) load_gates(gamma, reinterpret_cast<const float*>(stage + S::gates), kGamma, lane);
    };
    const auto load = [&] {
      const uint8_t* stage = stages + number * S::bytes;
      load_v<kGroups>(v, stage + v_of_lane, !transition);
      if (kRoomy) load_gamma(stage);
    };
    if (left > 0) {
      barrier_wait(&common.full[number], parity);
      load();
      begin_x<M>(x, operand, Tiles(stages, number * S::bytes).k_columns, [](int) {});
      multiply_wait<0>();
      pin(x);
    }
    // A turn of the loop goes from one X to the next, so that no product is under way when it begins.
    for (; left > 0; left--) {
      const int mine = number;
      uint8_t* stage = stages + mine * S::bytes;
      step();
      // Whether what comes next is there already; a warp together, by the time that this is wanted.
      const uint32_t there = kRoomy && left > 1 ? barrier_ended(&common.full[number], parity) : 0;
      bool loaded = false;
      if (!kRoomy) load_gamma(stage);
      advance<T, M, kOutput>(s, x, o, v, gamma, operand, factor, reinterpret_cast<const float*>(stage + S::gates), Tiles(stages, mine * S::bytes), lane, [&] {
        loaded = kRoomy && __ballot_sync(0xffffffffu, there != 0) == 0xffffffffu;
        if (loaded) load();
      });
      const float factor_of_o[2] = {factor[0], factor[1]};
      round_state<M>(operand, s, factor);
      // The last chunk has no successor: what it multiplies instead is not used. What the next begins with is loaded before the products, which would
      // hold it up.
      if (left > 1 && !loaded) {
        barrier_wait(&common.full[number], parity);
        load();
      }
      const Tiles next(stages, (left > 1 ? number : mine) * S::bytes);
      if constexpr (kOutput) {
        multiply_wait<0>();
        pin(o);
        if (kBounded<M> && !is_one(factor_of_o)) {
          const float back[2] = {1.f / factor_of_o[0], 1.f / factor_of_o[1]};
          multiply_rows(o, back);
        }
        uint32_t rounded[16];
        begin_x<M>(x, operand, next.k_columns, [&](int n) {
          rounded[2 * n] = Pair<T>::pack(o[n][0], o[n][1]), rounded[2 * n + 1] = Pair<T>::pack(o[n][2], o[n][3]);
        });
        put_output<kGroups>(rounded, stage + v_of_lane);
      } else {
        begin_x<M>(x, operand, next.k_columns, [](int) {});
      }
      int64_t page = -1;
      if constexpr (kOutput) page = *reinterpret_cast<const volatile int64_t*>(&common.page[mine]);  // here, so that the wait below hides its latency
      warp_arrive(&common.empty[mine]);
      multiply_wait<0>();
      pin(x);
      if constexpr (kOutput) {
        const int64_t at = wide ? page : int64_t(int32_t(page));
        if (at >= 0) {
          true_values();
          store_states(s, p.checkpoints, place(p.checkpoints, work, at));
          if (kBounded<M>) multiply_rows(s, factor);
        }
      }
    }
  }
}

// As many CTAs as there are multiprocessors, or units if these are fewer.
template <class T, class M, int kGroups, bool kOutput>
__global__ void __launch_bounds__(kThreads<kGroups>, 1)
    recurrence(const __grid_constant__ PrefillParams p, const __grid_constant__ Plan plan, const uint32_t units) {
  using S = Stage<kGroups>;
  GDN_SHARED(unaligned);
  let_next_start();
  uint8_t* stages = align_shared(unaligned, 1024);
  auto& common = *reinterpret_cast<Common<kGroups>*>(stages + kStages<kGroups> * S::bytes);
  // What needs nothing of the kernel before.
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages<kGroups>; i++) {
      barrier_init(&common.full[i], kCarriers + 1);
      barrier_init(&common.empty[i], 4 * kGroups * kWarpArrivals);
      barrier_init(&common.exchanged[i], 4 * kGroups * kWarpArrivals);
    }
    for (int i = 0; i < kUnits; i++) {
      barrier_init(&common.unit_full[i], 32);
      barrier_init(&common.unit_empty[i], 128 * kGroups + kProducers);
    }
    barrier_init_done();
    if (std::is_same_v<T, M> && plan.raw)
      for (const TensorMap& map : plan.groups) prefetch_map(map);
  }
  if (kOutput && p.zero_rest && plan.first_head == 0) zero_rest(p, kHead);
  __syncthreads();
  if (threadIdx.x >= 128 * kGroups) {
    if constexpr (kGroups == 2) registers_down<(kOutput ? 72 : 104)>();
    if constexpr (kGroups == 1) registers_down<152>();
    if (threadIdx.x < 128 * kGroups + 32)
      bring<T, M, kGroups, kOutput>(stages, common, p, plan, units);
    else
      carry<kGroups, kOutput>(stages, common, p, plan);
  } else {
    if constexpr (kGroups == 2) registers_up<(kOutput ? 216 : 200)>();
    // Half heads are not short of registers. But behind this the assembler knows a warp's lanes to be together, and keeps places in uniform registers.
    if constexpr (kGroups == 1) registers_down<248>();
    if (!kOutput) wait_for_previous();
    consume<T, M, kGroups, kOutput>(stages, common, p, plan);
  }
}

template <class T, class M, int kGroups, bool kOutput>
void launch(const PrefillParams& p, const Plan& plan, cudaStream_t stream) {
  constexpr int kBytes = shared_bytes<kGroups>();
  static bool allowed[64] = {};  // by device
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= 64 || !allowed[device]) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(recurrence<T, M, kGroups, kOutput>), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kBytes),
          "cudaFuncSetAttribute");
    if (device < 64) allowed[device] = true;
  }
  const int64_t units = plan.path.segment > 0 ? plan.segments : p.num_seqs;
  const int64_t all = units * plan.heads * (2 / kGroups) * (kOutput ? 1 : kTurns);
  const int64_t grid = all < multiprocessors() ? all : multiprocessors();
  GDN_LAUNCH_BEHIND((recurrence<T, M, kGroups, kOutput>), unsigned(grid), kThreads<kGroups>, kBytes, stream, p, plan, uint32_t(all));
  check(cudaGetLastError(), kOutput ? "prefill on sm_90a, recurrence" : "prefill on sm_90a, first pass");
}

template <bool kOutput, class T, class M>
void launch(const PrefillParams& p, const Plan& plan, cudaStream_t stream) {
  // The first pass always takes whole heads: two groups hide each other's waits.
  if constexpr (kOutput)
    if (plan.path.rows != kHead) return launch<T, M, 1, kOutput>(p, plan, stream);
  launch<T, M, 2, kOutput>(p, plan, stream);
}

template <bool kOutput>
void launch(const PrefillParams& p, const Plan& plan, cudaStream_t stream) {
  if (p.dtype == DType::f16) return launch<kOutput, __half, __half>(p, plan, stream);
  plan.path.half ? launch<kOutput, __nv_bfloat16, __half>(p, plan, stream) : launch<kOutput, __nv_bfloat16, __nv_bfloat16>(p, plan, stream);
}

}  // namespace

void launch_recurrence(const PrefillParams& p, const Plan& plan, cudaStream_t stream) { launch<true>(p, plan, stream); }
void launch_segments(const PrefillParams& p, const Plan& plan, cudaStream_t stream) { launch<false>(p, plan, stream); }

}  // namespace sm90
}  // namespace gdn
#endif
