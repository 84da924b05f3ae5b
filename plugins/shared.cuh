// Shared memory of a block. The emulator of the tests has these names too, and gives every block its own, full of NaN.
#pragma once

#ifndef SHARED_ARRAY
#define SHARED_ARRAY(type, name, count) __shared__ type name[count]
#endif
