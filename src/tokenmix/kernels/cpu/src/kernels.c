/* One translation unit per instruction set: every kernel, compiled for it. */
#include "aft_band.c"
#include "aft_simple.c"
#include "aft_full.c"
#include "hydra.c"
#include "linear.c"
#include "decode.c"
#include "external.c"
#include "aft_conv2d.c"
