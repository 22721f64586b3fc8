"""The mathematics of one pass: pure functions of weights, state and input. No I/O, no threads, no clocks."""
