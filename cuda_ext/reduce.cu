// out[row, column] += Σ partials[slot, row, column], slots in order.

struct ReduceArguments {
    Destination to;
    int64 slots;
};

extern "C" __global__ void __launch_bounds__(256) reduce_partials(const __grid_constant__ ReduceArguments arguments) {
    const Destination& to = arguments.to;
    const int64 column = static_cast<int64>(blockIdx.x) * 256 + threadIdx.x;
    if (column >= to.columns) return;
    // The grid's y and z together number the rows: neither alone may exceed 65535.
    const int64 row = static_cast<int64>(blockIdx.z) * gridDim.y + blockIdx.y;
    if (row >= to.rows) return;
    const float* partial = to.partials + row * to.columns + column;
    float sum = 0.0f;
#pragma unroll 8
    for (int64 slot = 0; slot < arguments.slots; ++slot) sum += partial[slot * to.rows * to.columns];
    to.out[row * to.out_stride + column] += sum;
}
