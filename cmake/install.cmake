# SPDX-License-Identifier: Apache-2.0
# Installs header, libraries, program, pkg-config file, CMake package, man pages, completion.
include(CMakePackageConfigHelpers)

install(FILES include/kvdrive.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS kvdrive_static kvdrive_shared EXPORT kvdriveTargets)
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
