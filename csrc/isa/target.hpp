// Code between these two is compiled for the named instruction set extensions and may only run where they are.
#pragma once

#define IBPO_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define IBPO_BEGIN_TARGET(extensions) \
    IBPO_PRAGMA(clang attribute push(__attribute__((target(extensions))), apply_to = function))
#define IBPO_END_TARGET IBPO_PRAGMA(clang attribute pop)
#else
#define IBPO_BEGIN_TARGET(extensions) IBPO_PRAGMA(GCC push_options) IBPO_PRAGMA(GCC target(extensions))
#define IBPO_END_TARGET IBPO_PRAGMA(GCC pop_options)
#endif
