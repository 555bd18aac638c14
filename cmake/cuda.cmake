# SPDX-License-Identifier: Apache-2.0
# libkvdrive-cuda.so, the module that backend_load.c opens: the CUDA sources, which live only under
# src/backend/cuda, and its own copy of the few C files that they call.  Everything else builds
# without nvcc, and one install runs with or without a GPU.
#
# KVD_CUDA_ARCHS: what machine code to make.  "all": sm_80, 86, 89, 90 and PTX for later ones (a
# release); "90" is what a developer of one machine wants.

set(KVD_CUDA_ARCHS all CACHE STRING "GPU architectures: all, or a list such as 90 or 80-real;90")
file(GLOB KVD_CUDA_SOURCES CONFIGURE_DEPENDS src/backend/cuda/*.cu)
set(KVD_CUDA_90A src/backend/cuda/cuda_attn_hopper.cu) # instructions of one architecture alone
list(FILTER KVD_CUDA_SOURCES EXCLUDE REGEX hopper)
if(KVD_CUDA STREQUAL "OFF" OR KVD_SANITIZE)
  return()
endif()
find_program(KVD_NVCC nvcc HINTS ENV CUDA_PATH PATH_SUFFIXES bin PATHS /usr/local/cuda)
if(NOT KVD_NVCC)
  if(KVD_CUDA STREQUAL "AUTO")
    message(STATUS "CUDA backend: left out, no nvcc found")
    return()
  endif()
  message(FATAL_ERROR "KVD_CUDA=ON, but nvcc was not found (PATH or CUDA_PATH)")
endif()

set(CMAKE_CUDA_COMPILER ${KVD_NVCC})
if(KVD_CUDA_ARCHS STREQUAL "all")
  set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90)
else()
  set(CMAKE_CUDA_ARCHITECTURES ${KVD_CUDA_ARCHS})
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

function(kvd_cuda_target name)
  set_target_properties(${name} PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON
                        CUDA_VISIBILITY_PRESET hidden CUDA_RUNTIME_LIBRARY Static)
  target_include_directories(${name} PRIVATE include src)
  target_compile_definitions(${name} PRIVATE KVD_DEBUG_LEVEL=${KVD_DEBUG_LEVEL})
  target_compile_options(${name} PRIVATE
                         $<$<COMPILE_LANGUAGE:C>:${KVD_BASELINE} ${KVD_WARNINGS}>
                         $<$<COMPILE_LANGUAGE:CUDA>:$<$<BOOL:${KVD_WERROR}>:-Werror=all-warnings>>)
endfunction()

add_library(kvdrive_cuda_90a OBJECT ${KVD_CUDA_90A})
kvd_cuda_target(kvdrive_cuda_90a)
set_target_properties(kvdrive_cuda_90a PROPERTIES CUDA_ARCHITECTURES 90a-real
                      POSITION_INDEPENDENT_CODE ON)
add_library(kvdrive_cuda MODULE ${KVD_CUDA_SOURCES} $<TARGET_OBJECTS:kvdrive_cuda_90a>
            src/base/alloc.c src/base/dtype.c src/base/misc.c src/base/status.c src/os/os_cgroup.c
            src/os/os_cpu.c src/os/os_facts.c src/os/os_file.c src/os/os_mem.c src/os/os_module.c
            src/os/os_pool.c src/backend/cpu/cpu_index_layout.c)
set_target_properties(kvdrive_cuda PROPERTIES OUTPUT_NAME kvdrive-cuda)
kvd_cuda_target(kvdrive_cuda)
# What there is code for, in words: PTX is compiled for later GPUs when it is loaded.
set(code ${CMAKE_CUDA_ARCHITECTURES})
list(TRANSFORM code REPLACE "^([0-9]+[af]?)$" "sm_\\1 and later")
list(TRANSFORM code REPLACE "^([0-9]+[af]?)-real$" "sm_\\1")
list(TRANSFORM code REPLACE "^([0-9]+[af]?)-virtual$" "what comes after sm_\\1")
list(JOIN code ", " code)
set_source_files_properties(src/backend/cuda/cuda_backend.cu PROPERTIES
                            COMPILE_DEFINITIONS "KVD_CUDA_CODE=\"${code}\"")
target_link_libraries(kvdrive_cuda PRIVATE ${CMAKE_DL_LIBS})
set(map ${CMAKE_CURRENT_SOURCE_DIR}/packaging/libkvdrive-cuda.map)
target_link_options(kvdrive_cuda PRIVATE LINKER:-z,defs LINKER:--version-script=${map})
set_target_properties(kvdrive_cuda PROPERTIES LINK_DEPENDS ${map})
install(TARGETS kvdrive_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
