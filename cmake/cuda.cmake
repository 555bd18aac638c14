# SPDX-License-Identifier: Apache-2.0
# CUDA sources live only under src/backend/cuda; everything else builds without nvcc.
# Sets KVD_CUDA_OBJECTS and KVD_CUDA_LIBS, both empty without CUDA.

file(GLOB KVD_CUDA_SOURCES CONFIGURE_DEPENDS src/backend/cuda/*.cu)
if(KVD_CUDA STREQUAL "OFF" OR (KVD_CUDA STREQUAL "AUTO" AND NOT KVD_CUDA_SOURCES))
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
if(NOT KVD_CUDA_SOURCES)
  message(STATUS "CUDA backend: no sources yet")
  return()
endif()

set(CMAKE_CUDA_COMPILER ${KVD_NVCC})
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90)
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
add_library(kvdrive_cuda OBJECT ${KVD_CUDA_SOURCES})
set_target_properties(kvdrive_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_STANDARD 17
                      CUDA_STANDARD_REQUIRED ON)
target_include_directories(kvdrive_cuda PRIVATE include src)
target_compile_definitions(kvdrive_objects PUBLIC KVD_HAVE_CUDA=1)
set(KVD_CUDA_OBJECTS $<TARGET_OBJECTS:kvdrive_cuda>)
set(KVD_CUDA_LIBS CUDA::cudart_static)
