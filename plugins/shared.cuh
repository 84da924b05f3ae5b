// Shared memory of a block. The emulator of the tests has these names too, and gives every block its own, full of NaN.
#pragma once

#ifndef SHARED_ARRAY
#define SHARED_ARRAY(type, name, count) __shared__ type name[count]
// Of the size that the launch gives, at a multiple of 1024 bytes.
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(1024) type name[]
#endif
