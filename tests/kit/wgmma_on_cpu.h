// Warpgroup instructions on a CPU: stands in for wgmma.cu.
//
// They are carried out as late as the program allows or as early, at random: registers that are overwritten too soon,
// buffers that are written too soon and missing fences show as wrong results. The instructions read what shared memory was
// at the last fence for them. Sums are NaN from an instruction until it has been waited for.

static uint32 __cvta_generic_to_shared(const void* address) {
    return static_cast<uint32>(static_cast<const unsigned char*>(address) - shared_memory()) + 1024;
}

namespace emulator {

using Decode = float (*)(uint32);

struct Product {
    int samples;
    Decode decode;
    uint64 operand;
    bool fresh;
    size_t group;
    int lanes;
    float* sums[128];
    const uint32* a[128];
};

// Sums of a thread that instructions work on.
struct Held {
    float* place;
    size_t last_group;
    std::vector<float> values;
};

struct Issuer {
    size_t products, groups;
    bool fenced;
    std::vector<Held> held;

    Held* find(const float* place) {
        for (Held& each : held)
            if (each.place == place) return &each;
        return nullptr;
    }
};

struct Warpgroup {
    std::vector<Product> products;
    size_t done;
};

static Issuer issuers[1024];
static Warpgroup warpgroups[8];
static std::vector<unsigned char> published;
static std::mt19937 coin;

static void forget_products(std::mt19937& random) {
    coin.seed(random());
    for (Issuer& issuer : issuers) issuer = {0, 0, false, {}};
    for (Warpgroup& group : warpgroups) group = {{}, 0};
    published.assign(shared.size() * 8, 0xFF);
}

static const bool registered = (at_block_start = forget_products, true);

[[noreturn]] static void stop(const char* what) {
    std::fprintf(stderr, "wgmma on a CPU: %s\n", what);
    std::abort();
}

// Element (sample, position) of an operand whose chunks of 16 bytes are exchanged in the 128-byte pattern, by address.
static float element(const Product& product, int sample, int position) {
    const uint32 start = (product.operand & 0x3FFF) << 4, stride = (product.operand >> 32 & 0x3FFF) << 4;
    uint32 address = start + sample / 8 * stride + sample % 8 * 128 + position * 2;
    address ^= (address >> 7 & 7) << 4;
    uint16_t bits;
    std::memcpy(&bits, published.data() + address - 1024, 2);
    return product.decode(bits);
}

static void carry_out(const Product& product, Issuer* lanes) {
    static float A[64][16], B[16][256];
    for (int lane = 0; lane < 128; ++lane) {
        const int row = lane / 32 * 16 + lane % 32 / 4, t = lane % 4;
        for (int r = 0; r < 4; ++r)
            for (int half = 0; half < 2; ++half)
                A[row + r % 2 * 8][2 * t + half + r / 2 * 8] = product.decode(product.a[lane][r] >> 16 * half & 0xFFFF);
    }
    for (int k = 0; k < 16; ++k)
        for (int n = 0; n < product.samples; ++n) B[k][n] = element(product, n, k);
    for (int lane = 0; lane < 128; ++lane) {
        float* const sums = lanes[lane].find(product.sums[lane])->values.data();
        for (int r = 0; r < product.samples / 2; ++r) {
            const int row = lane / 32 * 16 + lane % 32 / 4 + r / 2 % 2 * 8, column = r / 4 * 8 + lane % 4 * 2 + r % 2;
            double sum = product.fresh ? 0.0 : sums[r];
            for (int k = 0; k < 16; ++k) sum += static_cast<double>(A[row][k]) * B[k][column];
            sums[r] = static_cast<float>(sum);
        }
    }
}

static void issue(int samples, float* sums, const uint32* a, uint64 operand, bool fresh, Decode decode) {
    Issuer& own = issuers[running];
    Warpgroup& group = warpgroups[running / 128];
    if (!own.fenced) stop("an instruction without a fence before it");
    if (operand >> 62 != 1 || operand >> 49 & 7) stop("not the 128-byte pattern");
    if (own.products == group.products.size()) {
        group.products.push_back({samples, decode, operand, fresh, own.groups, 0, {}, {}});
    }
    Product& product = group.products[own.products++];
    if (product.samples != samples || product.operand != operand || product.fresh != fresh || product.group != own.groups) {
        stop("the threads of a warpgroup disagree");
    }
    Held* held = own.find(sums);
    if (!held) {
        own.held.push_back({sums, 0, std::vector<float>(sums, sums + samples / 2)});
        std::fill(sums, sums + samples / 2, NAN);
        held = &own.held.back();
    }
    held->last_group = own.groups;
    product.sums[running % 128] = sums;
    product.a[running % 128] = a;
    if (++product.lanes == 128 && coin() % 2) {
        while (group.done < own.products) carry_out(group.products[group.done++], issuers + running / 128 * 128);
    }
}

static void wait_for_groups(size_t pending) {
    Issuer& own = issuers[running];
    Warpgroup& group = warpgroups[running / 128];
    for (int patience = 0; group.done < own.products && group.products[group.done].group + pending < own.groups;) {
        if (group.products[group.done].lanes == 128) {
            carry_out(group.products[group.done++], issuers + running / 128 * 128);
        } else {
            if (++patience == 1 << 20) stop("some threads never issue an instruction that others wait for");
            wait(State::ready);
        }
    }
    for (size_t i = 0; i < own.held.size();) {
        Held& held = own.held[i];
        if (held.last_group + pending >= own.groups) {
            ++i;
            continue;
        }
        std::copy(held.values.begin(), held.values.end(), held.place);
        own.held.erase(own.held.begin() + i);
    }
}

}  // namespace emulator

static void wgmma_fence() { emulator::issuers[emulator::running].fenced = true; }

static void wgmma_commit() {
    ++emulator::issuers[emulator::running].groups;
    emulator::issuers[emulator::running].fenced = false;
}

template <int kPending>
static void wgmma_wait() {
    emulator::wait_for_groups(kPending);
}

template <int kSums>
static void wgmma_wait_for(float (&)[kSums], float (&)[kSums]) {
    emulator::wait_for_groups(0);
}

static void fence_shared_for_wgmma() {
    std::memcpy(emulator::published.data(), shared_memory(), emulator::published.size() - 1024);
}

static uint64 wgmma_operand(const unsigned char* tile) {
    const uint32 address = __cvta_generic_to_shared(tile);
    if (address % 1024) emulator::stop("an operand that is not at a multiple of 1024 bytes");
    return 1ull << 62 | 1024ull / 16 << 32 | 1ull << 16 | address >> 4;
}

static uint64 wgmma_operand_at(uint64 operand, int bytes) { return operand + bytes / 16; }

template <int kSums>
static void wgmma(BFloat16, float (&sums)[kSums], const uint32 (&a)[4], uint64 operand, bool fresh) {
    emulator::issue(2 * kSums, sums, a, operand, fresh, [](uint32 bits) { return float_of_bits(bits << 16); });
}

template <int kSums>
static void wgmma(Float16, float (&sums)[kSums], const uint32 (&a)[4], uint64 operand, bool fresh) {
    emulator::issue(2 * kSums, sums, a, operand, fresh, [](uint32 bits) { return float_of_half(bits); });
}
