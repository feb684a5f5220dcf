#include "cpu/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace fused_attn {

#define FUSED_ATTN_ISA(name)           \
  namespace isa_##name {               \
    extern const KernelTable kKernels; \
  }
#include "cpu/isas.inc"
#undef FUSED_ATTN_ISA

namespace {

bool runs_generic() { return true; }

#if defined(__x86_64__)
// What CMakeLists.txt lets the compiler use, feature by feature.
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// The kernels of an instruction set where they were built and can run. A macro's argument cannot
// be tested by #if, so the tables that were not built are dropped by the preprocessor's own paste.
#define FUSED_ATTN_TABLE_1(name)                                         \
  if (runs_##name() && (isa == nullptr || std::strcmp(isa, #name) == 0)) \
    return &isa_##name::kKernels;
#define FUSED_ATTN_TABLE_0(name)
#define FUSED_ATTN_TABLE(built, name) FUSED_ATTN_TABLE_PASTE(built, name)
#define FUSED_ATTN_TABLE_PASTE(built, name) FUSED_ATTN_TABLE_##built(name)

// isas.inc goes from the best to the last resort, so the first hit is the best.
const KernelTable* first_kernels(const char* isa) {
#define FUSED_ATTN_ISA(name) FUSED_ATTN_TABLE(FUSED_ATTN_ISA_BUILT_##name, name)
#include "cpu/isas.inc"
#undef FUSED_ATTN_ISA
  return nullptr;
}

const KernelTable& choose_kernels(const char* wanted) {
  const bool any = wanted == nullptr || *wanted == '\0';
  const KernelTable* table = first_kernels(any ? nullptr : wanted);
  if (table != nullptr) return *table;
  std::string names;
#define FUSED_ATTN_ISA(name) \
  if (first_kernels(#name) != nullptr) names += names.empty() ? #name : ", " #name;
#include "cpu/isas.inc"
#undef FUSED_ATTN_ISA
  throw std::invalid_argument("FUSED_ATTN_CPU_ISA must be one of " + names + " on this CPU, got " +
                              wanted);
}

std::atomic<const KernelTable*> current{nullptr};

}  // namespace

const KernelTable& kernels() {
  const KernelTable* table = current.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = &choose_kernels(std::getenv("FUSED_ATTN_CPU_ISA"));
    current.store(table, std::memory_order_release);
  }
  return *table;
}

void set_isa(const char* isa) {
  if (*isa == '\0') isa = std::getenv("FUSED_ATTN_CPU_ISA");
  current.store(&choose_kernels(isa), std::memory_order_release);
}

}  // namespace fused_attn
