# SPDX-License-Identifier: Apache-2.0
# Installs header, libraries, program, pkg-config file, CMake package, man pages, completion.
include(CMakePackageConfigHelpers)

install(FILES include/kvdrive.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS kvdrive_static kvdrive_shared EXPORT kvdriveTargets)
# The archive of the build has all names, for the tests; the installed one shows only kvd_*, so that
# nothing clashes in the programs it is linked into (jansson has a utf8_encode, too).
if(NOT KVD_SANITIZE)
  set(KVD_ARCHIVE ${CMAKE_CURRENT_BINARY_DIR}/dist/libkvdrive.a)
  file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/dist)
  add_custom_command(
    OUTPUT ${KVD_ARCHIVE} BYPRODUCTS ${KVD_ARCHIVE}.o
    COMMAND ${CMAKE_LINKER} -r -o ${KVD_ARCHIVE}.o
            $<TARGET_OBJECTS:kvdrive_objects>
    COMMAND ${CMAKE_OBJCOPY} --localize-hidden ${KVD_ARCHIVE}.o
    COMMAND ${CMAKE_COMMAND} -E rm -f ${KVD_ARCHIVE}
    COMMAND ${CMAKE_AR} rcs ${KVD_ARCHIVE} ${KVD_ARCHIVE}.o
    DEPENDS kvdrive_objects $<TARGET_OBJECTS:kvdrive_objects>
    COMMAND_EXPAND_LISTS VERBATIM)
  add_custom_target(kvdrive_archive ALL DEPENDS ${KVD_ARCHIVE})
  # A file of the same second counts as up to date: the build's archive has to go first.
  set(installed "\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/libkvdrive.a")
  install(CODE "file(REMOVE \"${installed}\")")
  install(FILES ${KVD_ARCHIVE} DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET kvdrive)
  install(TARGETS kvdrive)
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvdrive)
install(EXPORT kvdriveTargets NAMESPACE kvdrive:: DESTINATION ${package_dir})
configure_package_config_file(cmake/kvdriveConfig.cmake.in kvdriveConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(kvdriveConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvdriveConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/kvdriveConfigVersion.cmake DESTINATION ${package_dir})

# Relative to where the file lies, so that --prefix at install time is right too.
file(RELATIVE_PATH KVD_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" KVD_PC_PREFIX "${KVD_PC_PREFIX}")
configure_file(packaging/kvdrive.pc.in kvdrive.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvdrive.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

foreach(section 1 3 7)
  file(GLOB man_pages CONFIGURE_DEPENDS man/*.${section})
  if(man_pages)
    install(FILES ${man_pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man${section})
  endif()
endforeach()
if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/packaging/completion/kvdrive.bash)
  install(FILES packaging/completion/kvdrive.bash
          DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME kvdrive)
endif()
# Data of `kvdrive eval`, each folder with its own licence.
install(DIRECTORY eval/data/ DESTINATION ${CMAKE_INSTALL_DATADIR}/kvdrive/eval)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# What is installed, without the tests.
add_custom_target(kvdrive_product)
foreach(target kvdrive_static kvdrive_shared kvdrive_archive kvdrive kvdrive_cuda)
  if(TARGET ${target})
    add_dependencies(kvdrive_product ${target})
  endif()
endforeach()
