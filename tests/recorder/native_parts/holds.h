// What a part's own test says when something does not hold. Arguments of `HOLDS` are evaluated once.
#pragma once

#include <cstdio>
#include <cstdlib>

#define HOLDS(what)                                                    \
  do {                                                                 \
    if (!(what)) {                                                     \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
      std::exit(1);                                                    \
    }                                                                  \
  } while (false)
