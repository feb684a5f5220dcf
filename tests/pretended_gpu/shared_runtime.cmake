# Links _cuda to the shared CUDA runtime, which the simulated GPU replaces. The static runtime, which
# CMakeLists.txt selects, would require a driver. The call is deferred because _cuda is not yet
# defined.
cmake_language(DEFER CALL set_target_properties _cuda PROPERTIES CUDA_RUNTIME_LIBRARY Shared)
