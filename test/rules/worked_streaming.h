// worked_streaming.h: examples of Streaming DiLoCo that were worked out beforehand. The
// real scheduler (test_rules.c) and the plain replay (test_replay.c) must both give these
// numbers.
#pragma once

// The local parameters of two workers before each of eight steps and after the last,
// worked out by hand: two fragments of one element each, H = 4, tau = 1, alpha = 1/2.
static const double streaming_local[2][9][2] = {{{8, 8},
                                                 {4, 4},
                                                 {4.125, 2.25},
                                                 {3.0625, 1.625},
                                                 {3.03125, 2.8359375},
                                                 {3.515625, 2.41796875},
                                                 {5.23828125, 2.458984375},
                                                 {5.619140625, 2.7294921875},
                                                 {6.3095703125, 3.5782470703125}},
                                                {{8, 8},
                                                 {6, 5},
                                                 {5.875, 4},
                                                 {6.9375, 4},
                                                 {8.46875, 4.3046875},
                                                 {10.234375, 5.15234375},
                                                 {9.16796875, 6.076171875},
                                                 {12.583984375, 7.0380859375},
                                                 {15.2919921875, 6.0303955078125}}};

// Six sequences of torchft's regression tests: the values of two fragments before each of
// 15 steps and after the last. The gradient is always 2, the inner rate 1, H = 6, and the
// outer step plain SGD with rate 2. All workers do the same, so their number does not
// matter.
typedef struct StreamingSequence {
    int delay; // tau
    float alpha;
    double values[2][16];
} StreamingSequence;

static const StreamingSequence streaming_sequences[] = {
    {0,
     0,
     {{1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59},
      {1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53}}},
    {0,
     0.5f,
     {{1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25},
      {1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38}}},
    {0,
     1,
     {{1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29},
      {1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29}}},
    {1,
     0,
     {{1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47},
      {1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45}}},
    {1,
     0.5f,
     {{1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75},
      {1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35}}},
    {1,
     1,
     {{1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29},
      {1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29}}},
};
