# Links _cuda to the shared CUDA runtime, which the pretended one replaces. The static one, which
# CMakeLists.txt sets, would look for a driver. Deferred, as the target does not exist yet.
cmake_language(DEFER CALL set_target_properties _cuda PROPERTIES CUDA_RUNTIME_LIBRARY Shared)
