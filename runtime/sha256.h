// sha256.h: SHA-256 (FIPS 180-4), by which a file of tokens names its tokenizer.
#ifndef ACCO_RUNTIME_SHA256_H
#define ACCO_RUNTIME_SHA256_H

#include "runtime/numbers.h"

enum { SHA256_BYTES = 32, SHA256_BLOCK = 64 };

typedef struct Sha256 {
    uint32_t state[8];
    uint64_t count; // bytes so far
    uint8_t block[SHA256_BLOCK];
} Sha256;

// Hashing is begin, any number of add, end.
static inline void sha256_begin(Sha256 *sha) {
    static const uint32_t initial[8] = {0x6A09E667u, 0xBB67AE85u, 0x3C6EF372u, 0xA54FF53Au,
                                        0x510E527Fu, 0x9B05688Cu, 0x1F83D9ABu, 0x5BE0CD19u};
    memcpy(sha->state, initial, sizeof initial);
    sha->count = 0;
}

static inline uint32_t sha256_rotate(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

static inline void sha256_block(Sha256 *sha) {
    static const uint32_t constants[64] = {
        0x428A2F98u, 0x71374491u, 0xB5C0FBCFu, 0xE9B5DBA5u, 0x3956C25Bu, 0x59F111F1u, 0x923F82A4u,
        0xAB1C5ED5u, 0xD807AA98u, 0x12835B01u, 0x243185BEu, 0x550C7DC3u, 0x72BE5D74u, 0x80DEB1FEu,
        0x9BDC06A7u, 0xC19BF174u, 0xE49B69C1u, 0xEFBE4786u, 0x0FC19DC6u, 0x240CA1CCu, 0x2DE92C6Fu,
        0x4A7484AAu, 0x5CB0A9DCu, 0x76F988DAu, 0x983E5152u, 0xA831C66Du, 0xB00327C8u, 0xBF597FC7u,
        0xC6E00BF3u, 0xD5A79147u, 0x06CA6351u, 0x14292967u, 0x27B70A85u, 0x2E1B2138u, 0x4D2C6DFCu,
        0x53380D13u, 0x650A7354u, 0x766A0ABBu, 0x81C2C92Eu, 0x92722C85u, 0xA2BFE8A1u, 0xA81A664Bu,
        0xC24B8B70u, 0xC76C51A3u, 0xD192E819u, 0xD6990624u, 0xF40E3585u, 0x106AA070u, 0x19A4C116u,
        0x1E376C08u, 0x2748774Cu, 0x34B0BCB5u, 0x391C0CB3u, 0x4ED8AA4Au, 0x5B9CCA4Fu, 0x682E6FF3u,
        0x748F82EEu, 0x78A5636Fu, 0x84C87814u, 0x8CC70208u, 0x90BEFFFAu, 0xA4506CEBu, 0xBEF9A3F7u,
        0xC67178F2u};
    uint32_t words[64], v[8];
    // The message schedule: the block's sixteen words, and 48 computed from them.
    for (int i = 0; i < 16; i++) {
        const uint8_t *bytes = sha->block + 4 * i;
        words[i] = (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
    }
    for (int i = 16; i < 64; i++) {
        uint32_t a = words[i - 15], b = words[i - 2];
        uint32_t s0 = sha256_rotate(a, 7) ^ sha256_rotate(a, 18) ^ a >> 3;
        uint32_t s1 = sha256_rotate(b, 17) ^ sha256_rotate(b, 19) ^ b >> 10;
        words[i] = words[i - 16] + s0 + words[i - 7] + s1;
    }
    memcpy(v, sha->state, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t s1 = sha256_rotate(v[4], 6) ^ sha256_rotate(v[4], 11) ^ sha256_rotate(v[4], 25);
        uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
        uint32_t first = v[7] + s1 + choice + constants[i] + words[i];
        uint32_t s0 = sha256_rotate(v[0], 2) ^ sha256_rotate(v[0], 13) ^ sha256_rotate(v[0], 22);
        uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
        memmove(v + 1, v, 7 * sizeof v[0]);
        v[4] += first;
        v[0] = first + s0 + majority;
    }
    for (int i = 0; i < 8; i++) { sha->state[i] += v[i]; }
}

static inline void sha256_add(Sha256 *sha, const void *bytes, size_t count) {
    const uint8_t *byte = (const uint8_t *)bytes;
    while (count > 0) {
        size_t filled = (size_t)(sha->count % SHA256_BLOCK), taken = size_min(count, SHA256_BLOCK - filled);
        memcpy(sha->block + filled, byte, taken);
        sha->count += taken;
        byte += taken;
        count -= taken;
        if (filled + taken == SHA256_BLOCK) { sha256_block(sha); }
    }
}

static inline void sha256_end(Sha256 *sha, uint8_t digest[SHA256_BYTES]) {
    uint64_t bits = sha->count * 8;
    uint8_t length[8], padding[SHA256_BLOCK] = {0x80};
    for (int i = 0; i < 8; i++) { length[i] = (uint8_t)(bits >> (56 - 8 * i)); }
    size_t filled = (size_t)(sha->count % SHA256_BLOCK);
    sha256_add(sha, padding, (filled < 56 ? 56 : 56 + SHA256_BLOCK) - filled);
    sha256_add(sha, length, sizeof length);
    for (int i = 0; i < SHA256_BYTES; i++) { digest[i] = (uint8_t)(sha->state[i / 4] >> (24 - 8 * (i % 4))); }
}

#endif
