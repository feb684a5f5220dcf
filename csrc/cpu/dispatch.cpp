#include "cpu/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "block_ranges.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace fused_attn {

#define FUSED_ATTN_ISA(name, base)     \
  namespace isa_##name {               \
    extern const KernelTable kKernels; \
  }
#include "cpu/isas.inc"
#undef FUSED_ATTN_ISA

namespace {

[[maybe_unused]] bool runs_generic(bool = false) { return true; }
#if defined(__aarch64__)
bool runs_neon(bool = false) { return true; }  // all 64-bit ARM CPUs support NEON

bool runs_neon_bf16(bool = false) {
#if defined(__linux__)
  constexpr unsigned long kBFloat16 = 1ul << 14;  // HWCAP2_BF16 of asm/hwcap.h
  return (getauxval(AT_HWCAP2) & kBFloat16) != 0;
#elif defined(__APPLE__)
  int supported = 0;
  size_t size = sizeof(supported);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &supported, &size, nullptr, 0) == 0 &&
         supported != 0;
#else
  return false;
#endif
}
#endif

#if defined(__x86_64__)
// Returns one result register of cpuid; `which` is 0 to 3 for EAX to EDX.
unsigned cpuid_register(unsigned leaf, unsigned subleaf, int which) {
  unsigned registers[4] = {};
  __get_cpuid_count(leaf, subleaf, &registers[0], &registers[1], &registers[2], &registers[3]);
  return registers[which];
}

// Checks all features that CMakeLists.txt enables for the compiler. Uses cpuid where compilers lack
// the name in __builtin_cpu_supports: Clang 14 and GCC 10 lack f16c.
bool runs_avx2(bool = false) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         (cpuid_register(1, 0, 2) >> 29 & 1) != 0;
}

bool runs_avx512(bool = false) {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool runs_avx512_bf16(bool = false) {
  return runs_avx512() && (cpuid_register(7, 1, 0) >> 5 & 1) != 0;
}

// A process must request permission to use the tile registers. They add 8 KiB to the signal frames
// of each thread that uses them, so Linux refuses if an alternate signal stack is too small.
bool runs_amx(bool = false) {
#if defined(__linux__)
  const unsigned features = cpuid_register(7, 0, 3);
  const bool has_bf16 = (features >> 22 & 1) != 0, has_tiles = (features >> 24 & 1) != 0;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h
  return runs_avx512_bf16() && __builtin_cpu_supports("avx512vbmi") && has_bf16 && has_tiles &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#if defined(__linux__)
sigjmp_buf after_trap;

void on_trap(int) { siglongjmp(after_trap, 1); }

// Returns true if TDPFP16PS executes without SIGILL. The instruction needs no processor state
// beyond the AMX registers.
bool runs_tdpfp16ps() {
  struct sigaction trap = {}, before;
  trap.sa_handler = on_trap;
  sigemptyset(&trap.sa_mask);
  if (sigaction(SIGILL, &trap, &before) != 0) return false;
  alignas(64) uint8_t config[64] = {1};  // palette 1, three tiles of one row of 4 bytes
  for (int tile = 0; tile < 3; ++tile) {
    config[16 + 2 * tile] = 4;
    config[48 + tile] = 1;
  }
  // volatile, because it is read after siglongjmp.
  volatile bool supported = false;
  if (sigsetjmp(after_trap, 1) == 0) {
    asm volatile("ldtilecfg (%0)" : : "r"(config) : "memory");
    asm volatile(".byte 0xC4, 0xE2, 0x6B, 0x5C, 0xC1");  // tdpfp16ps tmm0, tmm1, tmm2
    supported = true;
  }
  asm volatile(".byte 0xC4, 0xE2, 0x78, 0x49, 0xC0");  // tilerelease
  sigaction(SIGILL, &before, nullptr);
  return supported;
}
#endif

// Some hypervisors hide feature bits; one Granite Rapids machine did not report this one. If the
// user selects amx_fp16 by name, the function also tries to execute the instruction.
[[maybe_unused]] bool runs_amx_fp16(bool by_name) {
  if (!runs_amx()) return false;
  if ((cpuid_register(7, 1, 0) >> 21 & 1) != 0) return true;
#if defined(__linux__)
  if (!by_name) return false;
  static const bool supported = runs_tdpfp16ps();
  return supported;
#else
  return by_name && false;
#endif
}
#endif

// On Intel CPUs, vdpbf16ps takes four times as long as a multiply-add (246 compared with 492
// GFLOP/s on two cores of the AMX generation), so avx512_bf16 is opt-in there.
bool pays_off(const char* isa) {
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx512_bf16") == 0) return __builtin_cpu_is("amd") != 0;
#endif
  return *isa != '\0';
}

#if defined(FUSED_ATTN_EMULATED)  // tests/x86_emulator supplies instructions that the CPU lacks
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

// Returns the kernels of an instruction set if they were built and can run. #if cannot test a macro
// argument, so token pasting drops the tables that were not built.
#define FUSED_ATTN_TABLE_1(name)                                           \
  if ((isa == nullptr ? pays_off(#name) : std::strcmp(isa, #name) == 0) && \
      (kEmulated || runs_##name(isa != nullptr)))                          \
    return &isa_##name::kKernels;
#define FUSED_ATTN_TABLE_0(name)
#define FUSED_ATTN_TABLE(built, name) FUSED_ATTN_TABLE_PASTE(built, name)
#define FUSED_ATTN_TABLE_PASTE(built, name) FUSED_ATTN_TABLE_##built(name)

// isas.inc is ordered from the best instruction set to the fallback, so the first match is the
// best.
const KernelTable* first_kernels(const char* isa) {
#define FUSED_ATTN_ISA(name, base) FUSED_ATTN_TABLE(FUSED_ATTN_ISA_BUILT_##name, name)
#include "cpu/isas.inc"
#undef FUSED_ATTN_ISA
  return nullptr;
}

const KernelTable& choose_kernels(const char* wanted) {
  const bool any = wanted == nullptr || *wanted == '\0';
  const KernelTable* table = first_kernels(any ? nullptr : wanted);
  if (table != nullptr) return *table;
  std::string names;
#define FUSED_ATTN_ISA(name, base) \
  if (first_kernels(#name) != nullptr) names += names.empty() ? #name : ", " #name;
#include "cpu/isas.inc"
#undef FUSED_ATTN_ISA
  throw std::invalid_argument("FUSED_ATTN_CPU_ISA must be one of " + names + " on this CPU, got " +
                              wanted);
}

// Sizes up to which float32 is faster with vectors than with AMX, because splitting an operand into
// three parts costs more than AMX gains. A size is a number of rows times head_dim: kQuerySize
// limits the queries, kSequenceSize both queries and keys.
//
// Time with AMX / time with vectors, forward and backward of 48 to 384 heads (Intel, family 6,
// model 207). On a host that slowed AMX down to a quarter: 1.10 to 1.74 and 0.96 to 1.37.
//   128 x 128, D 64: 1.54, 1.20    256 x 256, D 64: 1.09, 0.88    128 x 1024, D 64: 0.87, 0.88
//   197 x 197, D 64: 1.61, 1.09    384 x 384, D 64: 0.83, 0.78     48 x 1024, D 64: 1.32, 1.08
//   128 x 128, D 128: 1.11, 0.89   256 x 256, D 128: 0.79, 0.84   512 x 512, D 32: 1.09, 0.99
//   packed sequences of 16 to 256, D 32: 1.70, 1.27
constexpr int64_t kQuerySize = 8192, kSequenceSize = 16384;

bool wants_vectors(const AttentionParams& p, int64_t queries, int64_t keys) {
  const int64_t dim = max64(p.head_dim, p.head_dim_v);
  return p.dtype == DType::kFloat32 &&
         (queries * dim <= kQuerySize || max64(queries, keys) * dim <= kSequenceSize);
}

// The selected kernel table, and the table for problems for which wants_vectors() returns true.
std::atomic<const KernelTable*> current{nullptr}, current_vectors{nullptr};

// Selects and returns the kernels of an instruction set, or the best ones for null and "".
const KernelTable& make_current(const char* wanted) {
  const KernelTable* const table = &choose_kernels(wanted);
  const KernelTable* vectors = nullptr;
  const bool any = wanted == nullptr || *wanted == '\0';
  if (any && std::strncmp(table->isa, "amx", 3) == 0) vectors = first_kernels("avx512");
  current_vectors.store(vectors == nullptr ? table : vectors, std::memory_order_release);
  current.store(table, std::memory_order_release);
  return *table;
}

// Calls run(kernels, part) for the parts of a problem that use different kernels. Each packed
// sequence uses the kernels that it would use alone, so its result is bit-identical in any batch.
// With a bias, all sequences use the same kernels, because the bias gradient is a sum over them.
template <class Run>
bool run_parts(const AttentionParams& p, const Run& run) {
  const KernelTable &tiles = kernels(), &vectors = *current_vectors.load(std::memory_order_acquire);
  if (&tiles == &vectors || p.cu_seqlens_q == nullptr || p.mask.bias.data != nullptr)
    return run(attention_kernels(p), p);
  const auto is_short = [&](int64_t b) {
    return wants_vectors(p, query_rows(p, b).count, key_rows(p, b).count);
  };
  int64_t short_ones = 0;
  for (int64_t b = 0; b < p.batch; ++b) short_ones += is_short(b) ? 1 : 0;
  if (short_ones == p.batch) return run(vectors, p);
  if (short_ones == 0) return run(tiles, p);
  std::vector<uint8_t> left_out(static_cast<size_t>(p.batch));
  AttentionParams part = p;
  part.left_out = left_out.data();
  for (const KernelTable* table : {&vectors, &tiles}) {
    for (int64_t b = 0; b < p.batch; ++b) left_out[b] = is_short(b) != (table == &vectors);
    if (!run(*table, part)) return false;
  }
  return true;
}

}  // namespace

const KernelTable& kernels() {
  const KernelTable* const table = current.load(std::memory_order_acquire);
  return table != nullptr ? *table : make_current(std::getenv("FUSED_ATTN_CPU_ISA"));
}

const KernelTable& attention_kernels(const AttentionParams& p) {
  const KernelTable& table = kernels();
  const bool vectors = wants_vectors(p, p.seqlen_q, p.seqlen_k);
  return vectors ? *current_vectors.load(std::memory_order_acquire) : table;
}

bool attention_forward(const AttentionParams& p) {
  return run_parts(p, [](const KernelTable& table, const AttentionParams& part) {
    return table.attention_fwd(part);
  });
}

bool attention_backward(const AttentionBwdParams& p) {
  return run_parts(p.fwd, [&](const KernelTable& table, const AttentionParams& part) {
    AttentionBwdParams of_part = p;
    of_part.fwd = part;
    return table.attention_bwd(of_part);
  });
}

void set_isa(const char* isa) {
  make_current(*isa == '\0' ? std::getenv("FUSED_ATTN_CPU_ISA") : isa);
}

}  // namespace fused_attn
