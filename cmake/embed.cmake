# SPDX-License-Identifier: Apache-2.0
# Files as arrays in a C file, srv_file_NAME and srv_file_NAME_len; "." and "-" become "_".
# usage: cmake -DOUT=file.c -DFILES=a,b -P embed.cmake
string(REPLACE "," ";" FILES "${FILES}")
set(text "/* Made by cmake/embed.cmake. */\n#include <stddef.h>\n")
foreach(path ${FILES})
  get_filename_component(name ${path} NAME)
  string(REGEX REPLACE "[.-]" "_" name ${name})
  file(READ ${path} hex HEX)
  string(LENGTH "${hex}" len)
  math(EXPR len "${len} / 2")
  string(REGEX REPLACE "(..)" "0x\\1," hex "${hex}")
  string(APPEND text
         "extern const unsigned char srv_file_${name}[];\n"
         "extern const size_t srv_file_${name}_len;\n"
         "const unsigned char srv_file_${name}[] = {\n${hex}\n};\n"
         "const size_t srv_file_${name}_len = ${len};\n")
endforeach()
file(WRITE ${OUT} "${text}")
