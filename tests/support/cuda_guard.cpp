// CUDA device guard and hooks for a CPU build of torch, with which autograd records operations on
// CUDA tensors without values. Load the library before torch.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

class OneDevice final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
 public:
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(getDevice()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, OneDevice)

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
