# Adds the flags of the sanitizers in FUSED_ATTN_SANITIZE to a target (scripts/sanitize.py). They
# follow the flags of the target, and the last -O applies.
#
# ASan's checks are calls, because inline checks of always-inlined kernels take twice as long to
# compile.
function(sanitize target scope)
  target_compile_definitions(${target} ${scope} FUSED_ATTN_SANITIZE)
  target_compile_options(
    ${target} ${scope} -O1 -g1 -fno-omit-frame-pointer -fsanitize=${FUSED_ATTN_SANITIZE}
                       -fno-sanitize-recover=undefined
                       "SHELL:--param asan-instrumentation-with-call-threshold=0")
  target_link_options(${target} ${scope} -fsanitize=${FUSED_ATTN_SANITIZE})
endfunction()
