// The tile of one instantiation, from -D macros (chord_runtime/cuda/select.py), and what it takes in shared memory.
//
//   A tile is up to kTokens tokens times kRows rows of one expert's weight. Each of kWarpgroups consumer warpgroups owns
//   kBlocks 64-row blocks of it, for all tokens. A stage of the ring holds kStageK k64 blocks of both operands.
#pragma once
#include "chord/block.cuh"
#include "chord/copy.cuh"

namespace chord {

constexpr int kTokens = CHORD_TOKENS;          // most tokens of a tile: wgmma's N
constexpr int kNarrow = CHORD_NARROW;          // wgmma's N for tiles with no more rows than this; kTokens for one width
constexpr int kWarpgroups = CHORD_WARPGROUPS;  // consumers
constexpr int kBlocks = CHORD_BLOCKS;          // 64-row blocks a warpgroup
constexpr int kStageK = CHORD_STAGE_K;         // k64 blocks a stage
constexpr int kStages = CHORD_STAGES;
constexpr int kBox = CHORD_BOX;         // tokens of one tensor-map copy of activations
constexpr bool kGathered = kBox == 0;   // no such copies: rows come one by one
constexpr int kOccupancy = CHORD_OCCUPANCY;  // thread blocks a multiprocessor

enum Output { kPlain, kGateUp, kSwiGLU };  // rows as they are; un-interleaved to [gate | up]; silu(gate) * up
constexpr Output kOutput = static_cast<Output>(CHORD_OUTPUT);

constexpr int kRows = kWarpgroups * kBlocks * kBlockRows;
constexpr int kStrips = kRows / kStripRows;
constexpr int kConsumers = kWarpgroups * kWarpgroup;

static_assert(kTokens % 8 == 0 && kNarrow % 8 == 0 && 0 < kNarrow && kNarrow <= kTokens && kTokens <= 128, "wgmma's N");
static_assert(kRows % kStripRows == 0, "whole strips");
static_assert(kBlocks * kStageK % 2 == 0, "two register buffers take turns, chosen at compile time");

// With a short K all activations of a tile stay in shared memory, for kGroup tiles that differ in weight rows only; the
// ring then carries weights alone. 0: activations come through the ring, beside the weights.
constexpr int kResident = CHORD_RESIDENT;  // k64 blocks that stay
constexpr int kGroup = CHORD_GROUP;
constexpr int kSlots = CHORD_SLOTS;  // of activations that stay, or of the ring
static_assert(kResident ? kResident % kStageK == 0 : kGroup == 1 && kSlots == kStages, "whole stages; groups share");

// Whether tiles of the last wave may be divided by strips (scheduler.cuh). With few tokens memory bounds the kernel, and
// thread blocks that have ended leave it to the others.
constexpr bool kDivides = kTokens > 32 && kStrips > 1 && kGroup == 1;

// Activations of a slot: [k64 block][token][128 B], swizzled. Weights of a stage: [strip][k64 block][4608 B].
constexpr int kActivationStageBytes = kStageK * kTokens * kBlockK * 2;
constexpr int kActivationBytes = kResident ? kResident / kStageK * kActivationStageBytes : kActivationStageBytes;
constexpr int kWeightBytes = kStrips * kStageK * kStripBytes;
// The epilogue turns its tokens through shared memory, kChunk at a time: few, as a further stage is worth more.
constexpr int kChunk = smaller(kTokens, 32);
constexpr int kRowBytes = kBlocks * kBlockRows * 2 / (kOutput == kSwiGLU ? 2 : 1);

// One tile, as the producer describes it to the consumers in the tile's first stage.
struct Tile {
  int row0;     // first row, in the mode's order
  int rows;     // valid rows, 1..kTokens; 0 ends the kernel
  int expert;
  u16 strip;   // first strip of 128 rows of the weight
  u16 strips;  // 1..kStrips
};

struct Shared {
  u8 activations[kSlots][kActivationBytes];  // 1024-aligned, as the swizzle and the descriptors want it
  u8 weights[kStages][kWeightBytes];
  u8 staging[kWarpgroups][kChunk * kRowBytes];
  Tile tiles[kStages];
  int out_row[kWarpgroups][kTokens];
  float weight[kWarpgroups][kTokens];
  u64 full[kStages], empty[kStages];
  u64 rows_full[kSlots], rows_empty[kSlots];  // of the activations that stay
};
// Dynamic shared memory starts at 16 B alignment. The host computes the same figure to launch with.
static_assert(CHORD_SHARED_BYTES >= sizeof(Shared) + 1024, "select.py's shared_bytes");
// Read from the cubin by `chord warmup --check`, which holds it against the architecture's limit without a GPU.
extern "C" __constant__ unsigned chord_shared_bytes = CHORD_SHARED_BYTES;

CHORD_DEVICE Shared& aligned_shared(u8* raw) {
  return *reinterpret_cast<Shared*>(raw + (1024 - (shared_address(raw) & 1023)) % 1024);
}

// Offset of a member, a constant: addresses made of one base and these share a register.
template <class Member>
CHORD_DEVICE u32 offset_in(const Shared& shared, const Member& member) {
  return reinterpret_cast<const u8*>(&member) - reinterpret_cast<const u8*>(&shared);
}

// A position in a ring: stages in turn, with the parity of the phase that a wait is for.
template <int kLength>
struct Position {
  u32 stage, parity;
  CHORD_DEVICE void advance() {
    if (++stage == kLength) stage = 0, parity ^= 1;
  }
};
using RingPosition = Position<kStages>;

}  // namespace chord
