/* One translation unit per instruction set: every kernel, compiled for it. */
#include "band.c"
#include "scan.c"
#include "full.c"
#include "hydra.c"
#include "linear.c"
#include "step.c"
#include "external.c"
#include "conv2d.c"
