# SPDX-License-Identifier: Apache-2.0
# Compiler flags: warnings, the x86-64-v2 baseline, instruction sets by file name, sanitizers.

set(KVD_WARNINGS -Wall -Wextra -Wshadow -Wconversion -Wundef)
set(KVD_TEST_WARNINGS -Wall -Wextra -Wshadow -Wundef)
if(KVD_WERROR)
  list(APPEND KVD_WARNINGS -Werror)
  list(APPEND KVD_TEST_WARNINGS -Werror)
endif()

# One binary runs on every x86-64-v2; kernels beyond that are chosen at run time.
set(KVD_BASELINE -march=x86-64-v2)

set(avx2 -mavx2 -mfma -mf16c -mbmi2)
set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
set(avx512x ${avx512} -mavx512vnni -mavx512bf16)
set(amx ${avx512x} -mamx-tile -mamx-int8 -mamx-bf16)

# The instruction-set level of a source file is the end of its name.
function(kvd_set_isa_flags)
  foreach(src ${ARGN})
    set(flags)
    if(src MATCHES "_avx2\\.c$")
      set(flags ${avx2})
    elseif(src MATCHES "_avx512\\.c$")
      set(flags ${avx512})
    elseif(src MATCHES "_(avx512vnni|avx512bf16)\\.c$")
      set(flags ${avx512x})
    elseif(src MATCHES "_amx\\.c$")
      set(flags ${amx})
    elseif(src MATCHES "_ref\\.c$|/dtype[a-z_]*\\.c$")
      set(flags -ffp-contract=off)
    elseif(NOT src MATCHES "/cpu_(index|record)_[a-z0-9_]*\\.c$")
      continue()
    endif()
    if(src MATCHES "/cpu_(index|record)_[a-z0-9_]*\\.c$") # the same bits at all levels
      list(APPEND flags -ffp-contract=off)
    endif()
    # Where tests under sanitizers spend most of their time.
    if(KVD_SANITIZE AND src MATCHES "/cpu_(attn|dot_flt)_|_ref\\.c$")
      list(APPEND flags -O2)
    endif()
    set_source_files_properties(${src} PROPERTIES COMPILE_OPTIONS "${flags}")
  endforeach()
endfunction()

# Flags that every target of the build shares and no installed target carries.
add_library(kvd_flags INTERFACE)
target_compile_definitions(kvd_flags INTERFACE KVD_DEBUG_LEVEL=${KVD_DEBUG_LEVEL})
if(KVD_SANITIZE)
  target_compile_options(kvd_flags INTERFACE -fsanitize=${KVD_SANITIZE}
                         -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(kvd_flags INTERFACE -fsanitize=${KVD_SANITIZE})
endif()
if(KVD_FUZZ)
  if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "KVD_FUZZ needs clang (CC=clang)")
  endif()
  target_compile_options(kvd_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
