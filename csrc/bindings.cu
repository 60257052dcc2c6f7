// The doors to Python, and the only file that knows TVM FFI: tensors in, plain records out. Host code only.
//
// The front end has checked a call's meaning; what is checked here is what the kernels rely on without looking, so that
// a wrong call through another door is a ValueError and not a fault on the device.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "common/params.h"

// The little that is used of Python, of its stable interface. Weak: this library is not linked to one and loads without.
extern "C" {
struct PyObject;
struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* argument);
  int flags;
  const char* doc;
};
#define GDN_PYTHON(declaration) extern declaration __attribute__((weak))
GDN_PYTHON(PyObject _Py_NoneStruct);
GDN_PYTHON(PyObject _Py_FalseStruct);
GDN_PYTHON(PyObject _Py_TrueStruct);
GDN_PYTHON(PyObject* PyExc_RuntimeError);
GDN_PYTHON(void Py_IncRef(PyObject*));
GDN_PYTHON(void Py_DecRef(PyObject*));
GDN_PYTHON(void PyErr_Clear());
GDN_PYTHON(void PyErr_SetString(PyObject* type, const char* message));
GDN_PYTHON(void* PyEval_SaveThread());
GDN_PYTHON(void PyEval_RestoreThread(void*));
GDN_PYTHON(std::ptrdiff_t PyTuple_Size(PyObject*));
GDN_PYTHON(PyObject* PyTuple_GetItem(PyObject*, std::ptrdiff_t));  // borrowed
GDN_PYTHON(PyObject* PyDict_GetItemWithError(PyObject*, PyObject* key));  // borrowed; null without an error where there is none
GDN_PYTHON(int PyList_Append(PyObject*, PyObject*));
GDN_PYTHON(PyObject* PyObject_Type(PyObject*));
GDN_PYTHON(int PyObject_IsTrue(PyObject*));
GDN_PYTHON(int PyObject_RichCompareBool(PyObject*, PyObject*, int how));
GDN_PYTHON(PyObject* PyObject_GetAttr(PyObject*, PyObject* name));
GDN_PYTHON(int PyObject_SetAttr(PyObject*, PyObject* name, PyObject* value));
GDN_PYTHON(PyObject* PyObject_CallObject(PyObject*, PyObject* arguments));
GDN_PYTHON(PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...));
GDN_PYTHON(PyObject* PyCapsule_New(void*, const char* name, void (*destructor)(PyObject*)));
GDN_PYTHON(void* PyCapsule_GetPointer(PyObject*, const char* name));
GDN_PYTHON(PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module));
#undef GDN_PYTHON
}

namespace gdn {
namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;
using MaybeTensor = Optional<TensorView>;

constexpr int kPyEqual = 2, kPyOneArgument = 8;  // Py_EQ, METH_O

#define GDN_REQUIRE(condition) \
  if (!(condition)) TVM_FFI_THROW(ValueError)

// --- one tensor ------------------------------------------------------------------------------------------------------

std::string text(DLDataType dtype) { return tvm::ffi::DLDataTypeToString(dtype); }

bool is(const TensorView& x, int code, int bits) { return x.dtype().code == code && x.dtype().bits == bits && x.dtype().lanes == 1; }

DType dtype_of(const TensorView& x, const char* name) {
  if (is(x, kDLFloat, 32)) return DType::f32;
  if (is(x, kDLBfloat, 16)) return DType::bf16;
  if (is(x, kDLFloat, 16)) return DType::f16;
  if (is(x, kDLFloat8_e4m3fn, 8)) return DType::e4m3;
  if (is(x, kDLFloat8_e5m2, 8)) return DType::e5m2;
  TVM_FFI_THROW(ValueError) << name << " has dtype " << text(x.dtype()) << ", which the CUDA kernels do not know";
}

int size_of(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::bf16 || dtype == DType::f16 ? 2 : 1; }

DType float_of(const TensorView& x, const char* name) {
  const DType dtype = dtype_of(x, name);
  GDN_REQUIRE(size_of(dtype) > 1) << name << " must be float32, bfloat16 or float16, got " << text(x.dtype());
  return dtype;
}

DType input_of(const TensorView& x, const char* name) {
  const DType dtype = dtype_of(x, name);
  GDN_REQUIRE(dtype == DType::bf16 || dtype == DType::f16)
      << name << " must be bfloat16 or float16 for the CUDA kernels, got " << text(x.dtype());
  return dtype;
}

void* data_of(const TensorView& x) { return static_cast<char*>(x.data_ptr()) + x.byte_offset(); }

// Call-wide facts, for one message everywhere.
struct Call {
  DLDevice device;

  explicit Call(const TensorView& x, const char* name) : device(x.device()) {
#ifndef GDN_EMULATE
    GDN_REQUIRE(device.device_type == kDLCUDA)
#else
    GDN_REQUIRE(device.device_type == kDLCPU)
#endif
        << name << " must be on a CUDA device, got device type " << device.device_type;
  }

  void same_device(const TensorView& x, const char* name) const {
    GDN_REQUIRE(x.device().device_type == device.device_type && x.device().device_id == device.device_id)
        << name << " must be on the device of the call, cuda:" << device.device_id << ", got device type "
        << x.device().device_type << ", number " << x.device().device_id;
  }

  void dims(const TensorView& x, const char* name, int ndim) const {
    same_device(x, name);
    GDN_REQUIRE(x.ndim() == ndim) << name << " must have " << ndim << " dimensions, got " << x.ndim();
  }

  void shape(const TensorView& x, const char* name, std::initializer_list<int64_t> sizes) const {
    dims(x, name, int(sizes.size()));
    int i = 0;
    for (int64_t size : sizes) {
      GDN_REQUIRE(size < 0 || x.size(i) == size) << name << " must have size " << size << " in dimension " << i << ", got " << x.size(i);
      i++;
    }
  }

  void dense_last(const TensorView& x, const char* name) const {
    GDN_REQUIRE(x.stride(-1) == 1 || x.size(-1) <= 1) << name << " must be contiguous in its last dimension, got stride " << x.stride(-1);
  }

  Index index(const MaybeTensor& maybe, const char* name, int64_t at_least) const {
    if (!maybe.has_value()) return {nullptr, false};
    const TensorView x = *maybe;
    dims(x, name, 1);
    const bool wide = is(x, kDLInt, 64);
    GDN_REQUIRE(wide || is(x, kDLInt, 32)) << name << " must be int32 or int64, got " << text(x.dtype());
    GDN_REQUIRE(x.size(0) >= at_least) << name << " must have at least " << at_least << " entries, got " << x.size(0);
    GDN_REQUIRE(x.size(0) <= 1 || x.stride(0) == 1) << name << " must be contiguous, got stride " << x.stride(0);
    // Never null for a tensor that is given, even one without entries: null says "not given".
    void* data = data_of(x);
    return {data != nullptr ? data : reinterpret_cast<void*>(alignof(int64_t)), wide};
  }

  PageTable pages(const MaybeTensor& indices, const MaybeTensor& indptr, const MaybeTensor& last_len, int64_t page_size,
                  int64_t num_seqs) const {
    if (!indices.has_value()) return {};
    GDN_REQUIRE(indptr.has_value() && last_len.has_value()) << "page_indices needs page_indptr and last_page_len";
    return {index(indices, "page_indices", 0), index(indptr, "page_indptr", num_seqs + 1),
            index(last_len, "last_page_len", num_seqs), page_size};
  }

  // [rows, heads, V, K]
  States states(const MaybeTensor& maybe, const char* name, int64_t heads, int64_t v, int64_t k) const {
    if (!maybe.has_value()) return {};
    const TensorView x = *maybe;
    shape(x, name, {-1, heads, v, k});
    dense_last(x, name);
    States states{data_of(x), x.stride(0), x.stride(1), x.stride(2), dtype_of(x, name), false};
    const int64_t size = size_of(states.dtype);
    states.aligned = (reinterpret_cast<uintptr_t>(states.data) | uintptr_t(states.row * size) | uintptr_t(states.head * size) |
                      uintptr_t(states.v * size)) % 16 == 0;
    return states;
  }

  cudaStream_t stream() const {
    return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  }
};

bool every_head_aligned(const TensorView& x, const Strides3& stride, int bytes) {
  const auto size = uintptr_t(x.dtype().bits / 8);
  return (reinterpret_cast<uintptr_t>(data_of(x)) | uintptr_t(stride.batch) * size | uintptr_t(stride.token) * size |
          uintptr_t(stride.head) * size) % bytes == 0;
}

// [B, T, heads, ...]; a dimension of one element may claim any stride, which is then of no account.
Strides3 batched(const TensorView& x) {
  const auto stride = [&](int i) { return x.size(i) > 1 ? x.stride(i) : 0; };
  return {stride(0), stride(1), stride(2)};
}
// [T, heads, ...]
Strides3 packed(const TensorView& x) {
  const auto stride = [&](int i) { return x.size(i) > 1 ? x.stride(i) : 0; };
  return {0, stride(0), stride(1)};
}

// Launches go to the current device; make it the call's, and put it back.
struct DeviceGuard {
  int before = 0, now;
  explicit DeviceGuard(int device) : now(device) {
    check(cudaGetDevice(&before), "cudaGetDevice");
    if (before != now) check(cudaSetDevice(now), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (before != now) cudaSetDevice(before);
  }
};

template <class Function>
void guarded(Function&& function) {
  try {
    function();
  } catch (const CudaError& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
}

int32_t narrow(int64_t x, const char* name) {
  GDN_REQUIRE(x >= 0 && x <= INT32_MAX) << name << " is " << x << ", beyond what a launch can address";
  return int32_t(x);
}

bool head_size_served(int64_t size) { return size == 64 || size == 128; }

// --- decode ------------------------------------------------------------------------------------------------------------

DecodeParams decode_params(const Call& call, TensorView q, TensorView k, TensorView v, TensorView A_log, TensorView a,
                           TensorView dt_bias, TensorView b, TensorView state, MaybeTensor read_rows, MaybeTensor write_rows,
                           MaybeTensor steps, MaybeTensor page_indices, MaybeTensor page_indptr, MaybeTensor last_page_len,
                           TensorView output, double scale, bool l2norm, bool update_state) {
  call.dims(q, "q", 4);
  call.dims(v, "v", 4);
  const int64_t B = q.size(0), T = q.size(1), H = q.size(2), K = q.size(3), HV = v.size(2), V = v.size(3);
  GDN_REQUIRE(head_size_served(K) && head_size_served(V)) << "the CUDA kernels serve head sizes 64 and 128, got K = " << K << " and V = " << V;
  GDN_REQUIRE(H > 0 && HV % H == 0) << "the heads of v must be a multiple of those of q, got " << HV << " and " << H;
  call.shape(k, "k", {B, T, H, K});
  call.shape(v, "v", {B, T, HV, V});
  call.shape(output, "output", {B, T, HV, V});
  call.shape(a, "a", {B, T, HV});
  call.shape(b, "b", {B, T, HV});
  call.shape(A_log, "A_log", {HV});
  call.shape(dt_bias, "dt_bias", {HV});
  DecodeParams p{};
  p.dtype = input_of(q, "q");
  for (const auto& [x, name] : {std::pair<const TensorView&, const char*>{k, "k"}, {v, "v"}, {output, "output"}})
    GDN_REQUIRE(dtype_of(x, name) == p.dtype) << name << " must have q's dtype, got " << text(x.dtype());
  for (const auto& [x, name] : {std::pair<const TensorView&, const char*>{q, "q"}, {k, "k"}, {v, "v"}, {output, "output"}})
    call.dense_last(x, name);
  GDN_REQUIRE((HV <= 1 || A_log.stride(0) == 1) && (HV <= 1 || dt_bias.stride(0) == 1)) << "A_log and dt_bias must be contiguous";
  p.q = data_of(q), p.k = data_of(k), p.v = data_of(v), p.a = data_of(a), p.b = data_of(b);
  p.A_log = data_of(A_log), p.dt_bias = data_of(dt_bias), p.output = data_of(output);
  p.q_stride = batched(q), p.k_stride = batched(k), p.v_stride = batched(v), p.a_stride = batched(a);
  p.b_stride = batched(b), p.output_stride = batched(output);
  p.a_dtype = float_of(a, "a"), p.b_dtype = float_of(b, "b");
  p.A_log_dtype = float_of(A_log, "A_log"), p.dt_bias_dtype = float_of(dt_bias, "dt_bias");
  p.qk_aligned = every_head_aligned(q, p.q_stride, 16) && every_head_aligned(k, p.k_stride, 16);
  p.state = call.states(state, "state", HV, V, K);
  GDN_REQUIRE(size_of(p.state.dtype) > 1) << "state must be float32, bfloat16 or float16 in decode, got " << text(state.dtype());
  if (steps.has_value()) {
    const TensorView x = *steps;
    call.dims(x, "intermediate_states", 5);
    GDN_REQUIRE(x.size(0) >= B && x.size(1) >= T && x.size(2) == HV && x.size(3) == V && x.size(4) == K)
        << "intermediate_states must be [B, T or more, HV, V, K]";
    call.dense_last(x, "intermediate_states");
    GDN_REQUIRE(dtype_of(x, "intermediate_states") == p.state.dtype) << "intermediate_states must have the state's dtype";
    p.steps = {data_of(x), x.stride(0), x.stride(2), x.stride(3), p.state.dtype, false};
    p.steps_token = x.stride(1);
    const int64_t size = size_of(p.state.dtype);
    p.steps.aligned = (reinterpret_cast<uintptr_t>(p.steps.data) | uintptr_t(p.steps.row * size) | uintptr_t(p.steps.head * size) |
                       uintptr_t(p.steps.v * size) | uintptr_t(p.steps_token * size)) % 16 == 0;
  }
  GDN_REQUIRE(read_rows.has_value() == write_rows.has_value()) << "read rows and write rows go together";
  p.read_rows = call.index(read_rows, "read rows", B);
  p.write_rows = call.index(write_rows, "write rows", B);
  p.pages = call.pages(page_indices, page_indptr, last_page_len, 0, B);
  GDN_REQUIRE(read_rows.has_value() || page_indices.has_value() || state.size(0) >= B)
      << "state must have a row for each of the " << B << " sequences, got " << state.size(0);
  p.batch = narrow(B, "B"), p.tokens = narrow(T, "T"), p.heads = narrow(HV, "HV"), p.group = int32_t(HV / H);
  p.head_size_k = int32_t(K), p.head_size_v = int32_t(V);
  p.scale = float(scale), p.l2norm = l2norm, p.update_state = update_state;
  return p;
}

void launch_on(const Call& call, const DecodeParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.tokens == 0) return;
  const DeviceGuard guard(call.device.device_id);
  launch_decode(p, stream);
}

void run_decode(const Call& call, const DecodeParams& p, cudaStream_t stream) {
  guarded([&] { launch_on(call, p, stream); });
}

void decode(TensorView q, TensorView k, TensorView v, TensorView A_log, TensorView a, TensorView dt_bias, TensorView b,
            TensorView state, MaybeTensor read_rows, MaybeTensor write_rows, MaybeTensor steps, MaybeTensor page_indices,
            MaybeTensor page_indptr, MaybeTensor last_page_len, TensorView output, double scale, bool l2norm, bool update_state) {
  const Call call(q, "q");
  const DecodeParams p = decode_params(call, q, k, v, A_log, a, dt_bias, b, state, read_rows, write_rows, steps, page_indices,
                                       page_indptr, last_page_len, output, scale, l2norm, update_state);
  run_decode(call, p, call.stream());
}

// --- decode calls like an accepted one -----------------------------------------------------------------------------------

uintptr_t address_of(const DLTensor& x) { return reinterpret_cast<uintptr_t>(x.data) + x.byte_offset; }

DLTensor record_of(const TensorView& x) {
  return {x.data_ptr(), x.device(), x.ndim(), x.dtype(), const_cast<int64_t*>(x.shape().data()),
          const_cast<int64_t*>(x.strides().data()), x.byte_offset()};
}

// What a later call must share with an accepted one for nothing but addresses to change.
struct Signature {
  static constexpr int kMostDims = 5;
  bool given = false;
  int32_t ndim = 0;
  DLDataType dtype{};
  DLDevice device{};
  int64_t sizes[kMostDims] = {}, strides[kMostDims] = {};
  uintptr_t misalignment = 0;

  Signature() = default;
  explicit Signature(const DLTensor& x)
      : given(true), ndim(x.ndim), dtype(x.dtype), device(x.device), misalignment(address_of(x) % 16) {
    std::copy_n(x.shape, std::min(ndim, kMostDims), sizes);
    std::copy_n(x.strides, std::min(ndim, kMostDims), strides);
  }

  bool fits(const DLTensor& x) const { return of_kind(x) && address_of(x) % 16 == misalignment && same_strides(x); }
  // Addresses aside, and to the last stride.
  bool is(const DLTensor& x) const { return of_kind(x) && std::equal(strides, strides + ndim, x.strides); }

 private:
  bool of_kind(const DLTensor& x) const {
    return given && x.ndim == ndim && x.dtype.code == dtype.code && x.dtype.bits == dtype.bits && x.dtype.lanes == dtype.lanes &&
           x.device.device_type == device.device_type && x.device.device_id == device.device_id &&
           std::equal(sizes, sizes + ndim, x.shape);
  }
  // Where there is but one element, a stride may be anything and means nothing.
  bool same_strides(const DLTensor& x) const {
    for (int i = 0; i < ndim; i++)
      if (sizes[i] > 1 && strides[i] != x.strides[i]) return false;
    return true;
  }
};

struct AcceptedDecode {
  static constexpr int kTensors = 15;  // in the order of decode's arguments

  Call call;
  DecodeParams params;
  std::array<Signature, kTensors> signatures;

  // The same call with other tensors: tensor i is at `addresses[i]`, 0 where it is not given.
  DecodeParams with(const std::array<uintptr_t, kTensors>& addresses) const {
    DecodeParams p = params;
    const auto at = [&](int i) { return reinterpret_cast<void*>(addresses[i]); };
    p.q = at(0), p.k = at(1), p.v = at(2), p.A_log = at(3), p.a = at(4), p.dt_bias = at(5), p.b = at(6), p.state.data = at(7);
    p.read_rows.data = at(8), p.write_rows.data = at(9), p.steps.data = at(10), p.pages.indices.data = at(11);
    p.pages.indptr.data = at(12), p.pages.last_len.data = at(13), p.output = at(14);
    return p;
  }
};

bool run_again(const AcceptedDecode& accepted, tvm::ffi::PackedArgs tensors) {
  std::array<uintptr_t, AcceptedDecode::kTensors> addresses{};
  if (tensors.size() != AcceptedDecode::kTensors) return false;
  for (int i = 0; i < AcceptedDecode::kTensors; i++) {
    const Signature& wanted = accepted.signatures[i];
    const auto maybe = tensors[i].try_cast<TensorView>();
    if (maybe.has_value() != wanted.given || (!wanted.given && tensors[i] != nullptr)) return false;
    if (!wanted.given) continue;
    const DLTensor x = record_of(*maybe);
    if (!wanted.fits(x)) return false;
    addresses[i] = std::max<uintptr_t>(address_of(x), alignof(int64_t));
  }
  run_decode(accepted.call, accepted.with(addresses), accepted.call.stream());
  return true;
}

AcceptedDecode accept(TensorView q, TensorView k, TensorView v, TensorView A_log, TensorView a, TensorView dt_bias, TensorView b,
                      TensorView state, MaybeTensor read_rows, MaybeTensor write_rows, MaybeTensor steps, MaybeTensor page_indices,
                      MaybeTensor page_indptr, MaybeTensor last_page_len, TensorView output, double scale, bool l2norm,
                      bool update_state) {
  const Call call(q, "q");
  AcceptedDecode accepted{call, decode_params(call, q, k, v, A_log, a, dt_bias, b, state, read_rows, write_rows, steps, page_indices,
                                              page_indptr, last_page_len, output, scale, l2norm, update_state), {}};
  const MaybeTensor tensors[] = {q, k, v, A_log, a, dt_bias, b, state, read_rows, write_rows, steps, page_indices, page_indptr,
                                 last_page_len, output};
  for (int i = 0; i < AcceptedDecode::kTensors; i++)
    if (tensors[i].has_value()) accepted.signatures[i] = Signature(record_of(*tensors[i]));
  return accepted;
}

// A function of the 15 tensors of a later call, None for those not given: it serves a call whose tensors are of the same kind and
// returns true, or returns false. The call itself is not run.
tvm::ffi::Function decode_again(TensorView q, TensorView k, TensorView v, TensorView A_log, TensorView a, TensorView dt_bias,
                                TensorView b, TensorView state, MaybeTensor read_rows, MaybeTensor write_rows, MaybeTensor steps,
                                MaybeTensor page_indices, MaybeTensor page_indptr, MaybeTensor last_page_len, TensorView output,
                                double scale, bool l2norm, bool update_state) {
  const AcceptedDecode accepted = accept(q, k, v, A_log, a, dt_bias, b, state, read_rows, write_rows, steps, page_indices,
                                         page_indptr, last_page_len, output, scale, l2norm, update_state);
  return tvm::ffi::Function::FromPacked(
      [accepted](tvm::ffi::PackedArgs args, tvm::ffi::Any* served) { *served = run_again(accepted, args); });
}

// --- decode calls like an accepted one, as a function of Python's own ----------------------------------------------------
//
// The whole short way of gdn_multi/dispatch.py in one built-in function: a call of it costs no frame, no conversion of arguments,
// and of a tensor no more than torch's filling in of a record on the stack. And what may be done so of any call: the comparison.

const DLPackExchangeAPI* torch_api = nullptr;

// Whether decode_short and arguments_like may be used, which need torch's exchange interface at this address and a Python that
// exports its symbols.
bool read_objects_with(int64_t torch) {
  const auto* api = reinterpret_cast<const DLPackExchangeAPI*>(torch);
  if (api->header.version.major != DLPACK_MAJOR_VERSION || api->dltensor_from_py_object_no_sync == nullptr ||
      api->current_work_stream == nullptr || &PyTuple_GetItem == nullptr)
    return false;
  torch_api = api;
  return true;
}

// Other threads may run Python while this one launches: a launch waits when many are queued.
struct LockReleased {
  void* thread = PyEval_SaveThread();
  LockReleased() = default;
  LockReleased(const LockReleased&) = delete;
  ~LockReleased() { PyEval_RestoreThread(thread); }
};

bool is_none(PyObject* x) { return x == &_Py_NoneStruct; }

// A reference that is let go of.
struct Owned {
  PyObject* object;
  explicit Owned(PyObject* object) : object(object) {}
  Owned(const Owned&) = delete;
  ~Owned() { Py_DecRef(object); }  // null is fine
  PyObject* release() { return std::exchange(object, nullptr); }
};

bool is_true(PyObject* result) {
  const Owned owned(result);
  return result == nullptr || PyObject_IsTrue(result) != 0;  // an error: whatever is asked here speaks against the short way
}

// Whether an option or other scalar is what it was: types first, since values of others may not even compare.
bool equal(PyObject* given, PyObject* wanted) {
  if (given == wanted) return true;
  const Owned type(PyObject_Type(given)), wanted_type(PyObject_Type(wanted));
  return type.object == wanted_type.object && PyObject_RichCompareBool(given, wanted, kPyEqual) == 1;
}

// What asks Python must not leave an error behind: with one set, Python's next look-up of an attribute may find nothing.

// torch fills in a record on the stack; false: no tensor, or one that the record cannot describe.
bool read_tensor(PyObject* object, DLTensor* x) {
  if (torch_api->dltensor_from_py_object_no_sync(object, x) == 0) return true;
  PyErr_Clear();
  return false;
}

// -1: no tuple.
std::ptrdiff_t tuple_size(PyObject* object) {
  const std::ptrdiff_t size = PyTuple_Size(object);
  if (size < 0) PyErr_Clear();
  return size;
}

PyObject* nothing(PyObject* what) {
  PyErr_Clear();
  Py_IncRef(what);
  return what;
}

// dispatch.Surroundings: what must be as it was besides a call's arguments. Its items, in their order; a reference is held.
struct Surroundings {
  enum Item { kEnvironment, kNames, kValues, kGradEnabled, kRequiresGrad, kIsNeg, kItems };
  static constexpr int kVariables = 7;
  PyObject* tuple;
  PyObject *item[kItems], *name[kVariables], *value[kVariables];

  explicit Surroundings(PyObject* tuple) : tuple(tuple) {
    Py_IncRef(tuple);
    for (int i = 0; i < kItems; i++) item[i] = PyTuple_GetItem(tuple, i);
    for (int i = 0; i < kVariables; i++) name[i] = PyTuple_GetItem(item[kNames], i), value[i] = PyTuple_GetItem(item[kValues], i);
  }
  ~Surroundings() { Py_DecRef(tuple); }
  Surroundings(const Surroundings&) = delete;

  bool same_variables() const {
    for (int i = 0; i < kVariables; i++) {
      PyObject* const set = PyDict_GetItemWithError(item[kEnvironment], name[i]);
      if (set == nullptr ? !is_none(value[i]) : PyObject_RichCompareBool(set, value[i], kPyEqual) != 1) return false;
    }
    return true;
  }
  bool is_tensor(PyObject* object) const { return Owned(PyObject_GetAttr(object, item[kRequiresGrad])).object != nullptr; }
  bool grad_enabled() const { return is_true(PyObject_CallObject(item[kGradEnabled], nullptr)); }
  bool requires_grad(PyObject* tensor) const { return is_true(PyObject_GetAttr(tensor, item[kRequiresGrad])); }
  // Views whose sign is pending come from complex tensors, and there is no bfloat16 of those.
  bool sign_is_pending(PyObject* tensor, DLDataType dtype) const {
    return dtype.code == kDLFloat && is_true(PyObject_CallFunctionObjArgs(item[kIsNeg], tensor, nullptr));
  }
};

// Whether a call's arguments, of any function, are like an accepted call's: gdn_multi/dispatch.py, "calls like an earlier one".
struct Arguments {
  struct Argument {
    enum { kNone, kTensor, kTuple, kScalar, kUnread } type = kNone;  // the last: never like anything
    std::unique_ptr<Signature> signature;
    PyObject* scalar = nullptr;  // a reference is held
    std::vector<Argument> items;
  };

  Surroundings surroundings;
  std::vector<Argument> arguments;

  Arguments(PyObject* surroundings, PyObject* values) : surroundings(surroundings), arguments(remember(values)) {}
  ~Arguments() { forget(arguments); }

  PyObject* answer(PyObject* values) const {
    const bool same = surroundings.same_variables() && alike(arguments, values, surroundings.grad_enabled());
    return nothing(same ? &_Py_TrueStruct : &_Py_FalseStruct);
  }

 private:
  std::vector<Argument> remember(PyObject* values) const {
    std::vector<Argument> made(size_t(tuple_size(values)));
    for (size_t i = 0; i < made.size(); i++) {
      PyObject* const value = PyTuple_GetItem(values, std::ptrdiff_t(i));
      DLTensor x;
      if (is_none(value)) continue;
      if (tuple_size(value) >= 0) {
        made[i].type = Argument::kTuple, made[i].items = remember(value);
      } else if (read_tensor(value, &x)) {
        made[i].type = x.ndim <= Signature::kMostDims ? Argument::kTensor : Argument::kUnread;
        made[i].signature = std::make_unique<Signature>(x);
      } else if (surroundings.is_tensor(value)) {
        made[i].type = Argument::kUnread;
      } else {
        Py_IncRef(value);
        made[i].type = Argument::kScalar, made[i].scalar = value;
      }
      PyErr_Clear();
    }
    return made;
  }

  static void forget(std::vector<Argument>& arguments) {
    for (Argument& argument : arguments) {
      Py_DecRef(argument.scalar);
      forget(argument.items);
    }
  }

  bool alike(const std::vector<Argument>& wanted, PyObject* values, bool with_grad) const {
    if (tuple_size(values) != std::ptrdiff_t(wanted.size())) return false;
    for (size_t i = 0; i < wanted.size(); i++) {
      PyObject* const value = PyTuple_GetItem(values, std::ptrdiff_t(i));
      DLTensor x;
      switch (wanted[i].type) {
        case Argument::kNone:
          if (!is_none(value)) return false;
          break;
        case Argument::kScalar:
          if (!equal(value, wanted[i].scalar)) return false;
          break;
        case Argument::kUnread:
          return false;
        case Argument::kTuple:
          if (!alike(wanted[i].items, value, with_grad)) return false;
          break;
        case Argument::kTensor:
          if (!read_tensor(value, &x) || !wanted[i].signature->is(x) || (with_grad && surroundings.requires_grad(value)) ||
              surroundings.sign_is_pending(value, x.dtype))
            return false;
      }
    }
    return true;
  }
};

// A function of Python's own that takes one argument, and the C++ object that it belongs to.
template <class Object, PyObject* (Object::*call)(PyObject*) const>
struct PythonFunction {
  static PyObject* invoke(PyObject* self, PyObject* argument) {
    return (static_cast<const Object*>(PyCapsule_GetPointer(self, nullptr))->*call)(argument);
  }
  static void forget(PyObject* capsule) { delete static_cast<Object*>(PyCapsule_GetPointer(capsule, nullptr)); }

  // Appended to the list at `made`. Python's lock is held.
  static void append(std::unique_ptr<Object> object, int64_t made) {
    static PyMethodDef method = {"short_way", invoke, kPyOneArgument, nullptr};
    const Owned capsule(PyCapsule_New(object.get(), nullptr, forget));
    GDN_REQUIRE(capsule.object != nullptr) << "no capsule";
    object.release();
    const Owned function(PyCFunction_NewEx(&method, capsule.object, nullptr));
    GDN_REQUIRE(function.object != nullptr && PyList_Append(reinterpret_cast<PyObject*>(made), function.object) == 0)
        << "no function";
  }
};

// Appends to the list at `made` a function of a tuple of arguments: whether they are like those in the tuple at `values`, and all
// is as in the dispatch.Surroundings at `surroundings`.
void arguments_like(int64_t surroundings, int64_t values, int64_t made) {
  PythonFunction<Arguments, &Arguments::answer>::append(
      std::make_unique<Arguments>(reinterpret_cast<PyObject*>(surroundings), reinterpret_cast<PyObject*>(values)), made);
}

struct ShortDecode {
  // The items of dispatch.Terms, in their order.
  enum Term { kSurroundings, kOptions, kAllocations, kThread, kLast, kRecord, kLevels, kDebug, kLog, kTerms };
  static constexpr int kOptionCount = 4;
  // A call: the options, the output or None, and the other tensors.
  static constexpr int kOutput = kOptionCount, kFirst = kOutput + 1, kCall = kOptionCount + AcceptedDecode::kTensors;
  static constexpr int kInputs = 7;  // q to b

  AcceptedDecode accepted;
  PyObject* terms;  // a tuple; what follows is held by it
  Surroundings surroundings;
  PyObject *term[kTerms], *option[kOptionCount];

  ShortDecode(const AcceptedDecode& accepted, PyObject* terms)
      : accepted(accepted), terms(terms), surroundings(PyTuple_GetItem(terms, kSurroundings)) {
    Py_IncRef(terms);
    for (int i = 0; i < kTerms; i++) term[i] = PyTuple_GetItem(terms, i);
    for (int i = 0; i < kOptionCount; i++) option[i] = PyTuple_GetItem(term[kOptions], i);
  }
  ~ShortDecode() { Py_DecRef(terms); }
  ShortDecode(const ShortDecode&) = delete;

  // The output, a new reference; None, with nothing done, where the call is not like the accepted one; null with an error set.
  PyObject* serve(PyObject* call) const {
    std::array<uintptr_t, AcceptedDecode::kTensors> addresses{};
    if (tuple_size(call) != kCall || !like(call, addresses)) return nothing(&_Py_NoneStruct);
    Owned output(PyTuple_GetItem(call, kOutput));
    Py_IncRef(output.object);
    const auto place = [&] { return read(output.object, AcceptedDecode::kTensors - 1, addresses); };
    if (!is_none(output.object)) {
      if (!place()) return nothing(&_Py_NoneStruct);
    } else {
      bool made = false;
      for (int i = 0; !made && i < 2; i++) {  // where the first allocates on the current device, the second does on the call's
        PyObject* const how = PyTuple_GetItem(term[kAllocations], i);
        Owned another(PyObject_CallObject(PyTuple_GetItem(how, 0), PyTuple_GetItem(how, 1)));
        if (another.object == nullptr) return nullptr;
        std::swap(output.object, another.object);
        made = place();
      }
      if (!made) return nothing(&_Py_NoneStruct);
    }
    const DLDevice device = accepted.call.device;
    void* stream = nullptr;
    if (device.device_type != kDLCPU && torch_api->current_work_stream(device.device_type, device.device_id, &stream) != 0)
      return nothing(&_Py_NoneStruct);
    try {
      const DecodeParams p = accepted.with(addresses);
      const LockReleased released;
      launch_on(accepted.call, p, static_cast<cudaStream_t>(stream));
    } catch (const std::exception& error) {  // CudaError, and whatever else: nothing may be thrown through Python
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
    if (PyObject_SetAttr(term[kThread], term[kLast], term[kRecord]) != 0) return nullptr;
    // False: the logger has been asked, and nobody has set a level since.
    if (PyDict_GetItemWithError(term[kLevels], term[kDebug]) != &_Py_FalseStruct) {
      Owned logged(PyObject_CallFunctionObjArgs(term[kLog], term[kRecord], nullptr));
      if (logged.object == nullptr) return nullptr;
    }
    return output.release();
  }

 private:
  // Whether tensor i is of the accepted one's kind; if so, where it is.
  bool read(PyObject* object, int i, std::array<uintptr_t, AcceptedDecode::kTensors>& addresses) const {
    const Signature& wanted = accepted.signatures[i];
    if (is_none(object) || !wanted.given) return is_none(object) && !wanted.given;
    DLTensor x;
    if (!read_tensor(object, &x) || !wanted.fits(x)) return false;
    addresses[i] = std::max<uintptr_t>(address_of(x), alignof(int64_t));  // null says "not given", and a tensor may be empty
    return true;
  }

  bool like(PyObject* call, std::array<uintptr_t, AcceptedDecode::kTensors>& addresses) const {
    for (int i = 0; i < kOptionCount; i++)
      if (!equal(PyTuple_GetItem(call, i), option[i])) return false;
    for (int i = 0; i < AcceptedDecode::kTensors - 1; i++)
      if (!read(PyTuple_GetItem(call, kFirst + i), i, addresses)) return false;
    if (!surroundings.same_variables()) return false;
    if (surroundings.grad_enabled())
      for (int i = kOutput; i < kCall; i++) {
        PyObject* const tensor = PyTuple_GetItem(call, i);
        if (!is_none(tensor) && surroundings.requires_grad(tensor)) return false;
      }
    for (int i = 0; i < kInputs; i++)
      if (surroundings.sign_is_pending(PyTuple_GetItem(call, kFirst + i), accepted.signatures[i].dtype)) return false;
    return true;
  }
};

// Appends to the list at `made` a function of a call as a tuple (ShortDecode), for calls like this one under the dispatch.Terms at
// `terms`. The call itself is not run.
void decode_short(TensorView q, TensorView k, TensorView v, TensorView A_log, TensorView a, TensorView dt_bias, TensorView b,
                  TensorView state, MaybeTensor read_rows, MaybeTensor write_rows, MaybeTensor steps, MaybeTensor page_indices,
                  MaybeTensor page_indptr, MaybeTensor last_page_len, TensorView output, double scale, bool l2norm,
                  bool update_state, int64_t terms, int64_t made) {
  const AcceptedDecode accepted = accept(q, k, v, A_log, a, dt_bias, b, state, read_rows, write_rows, steps, page_indices,
                                         page_indptr, last_page_len, output, scale, l2norm, update_state);
  PythonFunction<ShortDecode, &ShortDecode::serve>::append(
      std::make_unique<ShortDecode>(accepted, reinterpret_cast<PyObject*>(terms)), made);
}

// --- page slots --------------------------------------------------------------------------------------------------------

int32_t* rows_out(const Call& call, const TensorView& x, const char* name, int64_t n) {
  call.shape(x, name, {n});
  GDN_REQUIRE(is(x, kDLInt, 32) && (n <= 1 || x.stride(0) == 1)) << name << " must be contiguous int32";
  return static_cast<int32_t*>(data_of(x));
}

void decode_slots(TensorView page_indices, TensorView page_indptr, TensorView last_page_len, TensorView read, TensorView write) {
  const Call call(page_indices, "page_indices");
  const int64_t n = last_page_len.size(0);
  SlotsParams p{};
  p.pages = call.pages(page_indices, page_indptr, last_page_len, 0, n);
  p.num_seqs = narrow(n, "the number of sequences");
  p.read = rows_out(call, read, "read rows", n);
  p.write = rows_out(call, write, "write rows", n);
  guarded([&] {
    const DeviceGuard guard(call.device.device_id);
    launch_page_slots(p, call.stream());
  });
}

void prefill_slots(TensorView cu_seqlens, TensorView page_indices, TensorView page_indptr, TensorView last_page_len,
                   int64_t page_size, TensorView read, TensorView write, TensorView starts, TensorView prefix) {
  const Call call(page_indices, "page_indices");
  const int64_t n = last_page_len.size(0);
  GDN_REQUIRE(page_size > 0 && page_size % 64 == 0) << "page_size must be a positive multiple of 64, got " << page_size;
  SlotsParams p{};
  p.pages = call.pages(page_indices, page_indptr, last_page_len, page_size, n);
  p.cu_seqlens = call.index(cu_seqlens, "cu_seqlens", n + 1);
  p.num_seqs = narrow(n, "the number of sequences");
  p.read = rows_out(call, read, "read rows", n);
  p.write = rows_out(call, write, "write rows", n);
  p.starts = rows_out(call, starts, "checkpoint starts", n);
  p.prefix = rows_out(call, prefix, "prefix lengths", n);
  guarded([&] {
    const DeviceGuard guard(call.device.device_id);
    launch_page_slots(p, call.stream());
  });
}

// --- prefill -----------------------------------------------------------------------------------------------------------

void prefill(TensorView q, TensorView k, TensorView v, MaybeTensor g, MaybeTensor beta, MaybeTensor A_log, MaybeTensor dt_bias,
             TensorView cu_seqlens, MaybeTensor initial, MaybeTensor read_rows, MaybeTensor final, MaybeTensor write_rows,
             MaybeTensor checkpoints, MaybeTensor checkpoint_starts, MaybeTensor checkpoint_rows, MaybeTensor prefix_lens,
             MaybeTensor page_indices, MaybeTensor page_indptr, MaybeTensor last_page_len, TensorView output, double scale,
             int64_t gate, bool beta_is_logit, bool l2norm, bool copy_empty, bool zero_rest, int64_t checkpoint_every,
             int64_t page_size, int64_t rows, int64_t sm90_segment, bool sm90_half, bool fused, bool pairs, MaybeTensor scratch) {
  const Call call(q, "q");
  call.dims(q, "q", 3);
  call.dims(k, "k", 3);
  call.dims(v, "v", 3);
  const int64_t T = q.size(0), Hq = q.size(1), K = q.size(2), Hk = k.size(1), Hv = v.size(1), V = v.size(2);
  const int64_t Ho = Hq > Hv ? Hq : Hv, N = cu_seqlens.size(0) - 1;
  GDN_REQUIRE(head_size_served(K) && head_size_served(V)) << "the CUDA kernels serve head sizes 64 and 128, got K = " << K << " and V = " << V;
  GDN_REQUIRE(Hq > 0 && Hk > 0 && Hv > 0 && Ho % Hq == 0 && Ho % Hk == 0 && Ho % Hv == 0)
      << "heads of q, k and v must divide the larger of q's and v's, got " << Hq << ", " << Hk << ", " << Hv;
  GDN_REQUIRE(N >= 0) << "cu_seqlens must not be empty";
  call.shape(k, "k", {T, Hk, K});
  call.shape(v, "v", {T, Hv, V});
  call.shape(output, "output", {T, Ho, V});
  PrefillParams p{};
  p.dtype = input_of(q, "q");
  for (const auto& [x, name] : {std::pair<const TensorView&, const char*>{k, "k"}, {v, "v"}, {output, "output"}})
    GDN_REQUIRE(dtype_of(x, name) == p.dtype) << name << " must have q's dtype, got " << text(x.dtype());
  for (const auto& [x, name] : {std::pair<const TensorView&, const char*>{q, "q"}, {k, "k"}, {v, "v"}, {output, "output"}})
    call.dense_last(x, name);
  p.q = data_of(q), p.k = data_of(k), p.v = data_of(v), p.output = data_of(output);
  p.q_stride = packed(q), p.k_stride = packed(k), p.v_stride = packed(v), p.output_stride = packed(output);
  p.q_aligned = every_head_aligned(q, p.q_stride, 16), p.k_aligned = every_head_aligned(k, p.k_stride, 16);
  p.v_aligned = every_head_aligned(v, p.v_stride, 16), p.output_paired = every_head_aligned(output, p.output_stride, 4);
  GDN_REQUIRE(gate >= 0 && gate <= int64_t(Gate::raw)) << "gate must be 0 to 3, got " << gate;
  p.gate = Gate(gate);
  GDN_REQUIRE(g.has_value() == (p.gate != Gate::none)) << "g is given exactly when there is a gate";
  GDN_REQUIRE((A_log.has_value() && dt_bias.has_value()) == (p.gate == Gate::raw)) << "A_log and dt_bias go with a raw gate";
  if (g.has_value()) {
    call.shape(*g, "g", {T, Ho});
    p.g = data_of(*g), p.g_stride = packed(*g), p.g_dtype = float_of(*g, "g");
  }
  if (beta.has_value()) {
    call.shape(*beta, "beta", {T, Ho});
    p.beta = data_of(*beta), p.beta_stride = packed(*beta), p.beta_dtype = float_of(*beta, "beta");
  }
  if (A_log.has_value()) {
    call.shape(*A_log, "A_log", {Ho});
    call.shape(*dt_bias, "dt_bias", {Ho});
    GDN_REQUIRE(Ho <= 1 || ((*A_log).stride(0) == 1 && (*dt_bias).stride(0) == 1)) << "A_log and dt_bias must be contiguous";
    p.A_log = data_of(*A_log), p.A_log_dtype = float_of(*A_log, "A_log");
    p.dt_bias = data_of(*dt_bias), p.dt_bias_dtype = float_of(*dt_bias, "dt_bias");
  }
  p.beta_is_logit = beta_is_logit, p.l2norm = l2norm, p.zero_rest = zero_rest, p.scale = float(scale);
  p.num_tokens = T;
  p.num_seqs = narrow(N, "the number of sequences"), p.heads = narrow(Ho, "the number of heads");
  p.q_group = int32_t(Ho / Hq), p.k_group = int32_t(Ho / Hk), p.v_group = int32_t(Ho / Hv);
  p.head_size_k = int32_t(K), p.head_size_v = int32_t(V);
  p.cu_seqlens = call.index(cu_seqlens, "cu_seqlens", N + 1);
  p.initial = call.states(initial, "initial_state", Ho, V, K);
  p.final = call.states(final, "final_state", Ho, V, K);
  p.checkpoints = call.states(checkpoints, "state_checkpoints", Ho, V, K);
  p.copy_empty = copy_empty;
  p.read_rows = call.index(read_rows, "read rows", N);
  p.write_rows = call.index(write_rows, "write rows", N);
  p.checkpoint_starts = call.index(checkpoint_starts, "checkpoint starts", N);
  p.checkpoint_rows = call.index(checkpoint_rows, "checkpoint rows", 0);
  p.prefix_lens = call.index(prefix_lens, "prefix_lens", N);
  p.checkpoint_every = checkpoint_every;
  GDN_REQUIRE(checkpoint_every >= 0 && checkpoint_every % 64 == 0) << "checkpoint_every must be a multiple of 64, got " << checkpoint_every;
  p.pages = call.pages(page_indices, page_indptr, last_page_len, page_size, N);
  if (page_indices.has_value()) {
    GDN_REQUIRE(page_size > 0 && page_size % 64 == 0) << "page_size must be a positive multiple of 64, got " << page_size;
    GDN_REQUIRE(checkpoint_every == page_size) << "with a page table checkpoint_every is the page size";
  }
  GDN_REQUIRE(checkpoint_every == 0 || p.checkpoints.data == nullptr || page_indices.has_value() || checkpoint_starts.has_value())
      << "checkpoints need their starts";
  (fused ? p.fused_rows : p.sm90_rows) = narrow(rows, "rows"), p.sm90_segment = narrow(sm90_segment, "sm90_segment"), p.sm90_half = sm90_half, p.sm90_pairs = pairs;
  GDN_REQUIRE(!fused || (p.dtype == DType::bf16 && K == 128)) << "one launch serves bfloat16 and K = 128";
  GDN_REQUIRE(!fused || (rows >= 16 && rows % 16 == 0 && V % rows == 0)) << "rows must be a multiple of 16 that divides V, got " << rows;
  if (N == 0 || Ho == 0) return;
  guarded([&] {
    const DeviceGuard guard(call.device.device_id);
    p.workspace_bytes = prefill_workspace(p);
    if (p.workspace_bytes == 0) return launch_prefill(p, call.stream());
    if (scratch.has_value()) {  // given by those who want to look into it
      GDN_REQUIRE((*scratch).IsContiguous() && (*scratch).numel() >= p.workspace_bytes && is(*scratch, kDLUInt, 8))
          << "scratch must be uint8 of at least " << p.workspace_bytes << " elements, got " << (*scratch).numel();
      call.same_device(*scratch, "scratch");
      p.workspace = data_of(*scratch);
      return launch_prefill(p, call.stream());
    }
    const int64_t bytes[1] = {p.workspace_bytes};
    // Of torch's own allocator: freed when this returns, reused in the order of the stream, and held by a graph's pool.
    tvm::ffi::Tensor workspace = tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, tvm::ffi::ShapeView(bytes, 1),
                                                                DLDataType{kDLUInt, 8, 1}, call.device);
    p.workspace = workspace.data_ptr();
    launch_prefill(p, call.stream());
  });
}

}  // namespace
}  // namespace gdn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, gdn::decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_again, gdn::decode_again);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_short, gdn::decode_short);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(arguments_like, gdn::arguments_like);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(read_objects_with, gdn::read_objects_with);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_slots, gdn::decode_slots);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prefill_slots, gdn::prefill_slots);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prefill, gdn::prefill);
