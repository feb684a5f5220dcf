# Sets cuda_sources to the source files of the CUDA kernels, for the CUDA module and for the emulator
# of the tests.
#
# Each pass in cuda_passes is a template in <pass>.cuh. A generated source file instantiates it for
# one head_dim of head_dims.inc. Compiling all instantiations takes minutes on one core; with a file
# for each, the build uses all cores.
set(cuda_passes attention_fwd attention_decode attention_weights
                attention_bwd_dq attention_bwd_dkdv attention_bwd_bias)
set(cuda_params_attention_fwd AttentionParams)
set(cuda_params_attention_decode AttentionParams CacheParams)
set(cuda_params_attention_weights AttentionWeightsParams)
set(cuda_params_attention_bwd_dq AttentionBwdParams)
set(cuda_params_attention_bwd_dkdv AttentionBwdParams)
set(cuda_params_attention_bwd_bias AttentionBwdParams)

set(cuda_dir ${CMAKE_CURRENT_LIST_DIR})
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${cuda_dir}/head_dims.inc)
file(STRINGS ${cuda_dir}/head_dims.inc cuda_head_dims REGEX "^FUSED_ATTN_HEAD_DIM\\(")
list(TRANSFORM cuda_head_dims REPLACE "^FUSED_ATTN_HEAD_DIM\\(([0-9]+)\\).*" "\\1")

# Generate the instantiations in the build directory, and append them to the *.cu files.
file(GLOB cuda_sources CONFIGURE_DEPENDS ${cuda_dir}/*.cu)
foreach(pass IN LISTS cuda_passes)
  set(arguments "")
  foreach(params IN LISTS cuda_params_${pass} ITEMS GpuParams)
    list(APPEND arguments "const ${params}&")
  endforeach()
  list(JOIN arguments ", " arguments)
  foreach(head_dim IN LISTS cuda_head_dims)
    set(instantiation ${CMAKE_CURRENT_BINARY_DIR}/${pass}_${head_dim}.cu)
    configure_file(${cuda_dir}/instantiate.cu.in ${instantiation} @ONLY)
    list(APPEND cuda_sources ${instantiation})
  endforeach()
endforeach()
