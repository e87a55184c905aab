// What the instructions do. Asynchronous things happen late: a product reads shared memory only when it is awaited, a
// copy lands when the dice say so.
#include "emulated_ptx.h"

#include "fibers.h"

namespace penstock {

// The words of an emulated tensor map.
enum MapWord { kAddress, kColumns, kRows, kStrideBytes, kBoxRows, kOnHost };

static u32 swizzled(u32 address) { return address ^ ((address >> 3) & 0x70); }
static float from_bits(unsigned short bits) {
  u32 wide = (u32)bits << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
static unsigned short to_bits(float value) {
  u32 wide;
  std::memcpy(&wide, &value, 4);
  if (value != value) return 0x7fff;
  return (unsigned short)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

u32 thread_index() { return self().thread; }
u32 warp_index() { return self().thread / 32; }
u32 lane_index() { return self().thread % 32; }
bool elected() { return lane_index() == 0; }
u32 cluster_index() { return machine().cluster; }
u32 cluster_rank() { return self().cta->rank; }
u32 shared_base() { return in_cta((kSharedStart + 1023) & ~1023u, self().cta->rank); }

void sync_warp() { machine().meet(self().cta->warps[warp_index()], 32); }
void sync_cluster() { machine().meet(machine().everyone, machine().threads * (u32)machine().ctas.size()); }
void sync_warpgroup(u32 barrier) { machine().meet(self().cta->named[barrier], 128); }

void init_barrier(u32 barrier, u32 count) {
  self().cta->at(barrier, 8);  // it must lie in shared memory
  self().cta->barriers[barrier] = {count, count};
}
void fence_barrier_init() {}
void arrive_expecting(u32 barrier, u32 bytes) {
  self().cta->barrier(barrier).bytes += bytes;
  self().cta->barrier(barrier).arrive();
}
void arrive_at(u32 barrier, u32 rank) {
  if (rank >= machine().ctas.size()) throw std::runtime_error("an arrival in a CTA that is not in the cluster");
  machine().ctas[rank].barrier(in_cta(barrier, rank)).arrive();
}
void wait(u32 barrier, u32 parity, u64, u32 site) {
  self().site = site;
  machine().wait(self().cta->barrier(barrier), parity);
}

u64 policy_read_once() { return 0; }
u64 policy_keep() { return 0; }

static void land(const TensorMap& map, const Cta& from, u32 peers, u32 to, int column, int row, u32 barrier) {
  const u32 box_bytes = (u32)map.words[kBoxRows] * 128;
  for (Cta& cta : machine().ctas) {
    if (!(peers >> cta.rank & 1)) continue;
    for (u32 r = 0; r < map.words[kBoxRows]; ++r) {
      for (u32 c = 0; c < 64; ++c) {
        const long long at_row = row + (long long)r, at_column = column + (long long)c;
        const bool inside = at_row < (long long)map.words[kRows] && at_column < (long long)map.words[kColumns];
        unsigned short bits = 0;
        const u64 source = map.words[kAddress] + at_row * map.words[kStrideBytes] + 2 * at_column;
        if (inside) std::memcpy(&bits, (const void*)source, 2);
        std::memcpy(cta.at(in_cta(swizzled(to + r * 128 + c * 2), cta.rank), 2), &bits, 2);
        if (inside && map.words[kOnHost] && cta.rank == from.rank) machine().host_bytes_read += 2;
      }
    }
    cta.barrier(in_cta(barrier, cta.rank)).bytes -= box_bytes;
    cta.barrier(in_cta(barrier, cta.rank)).settle();
  }
}
void copy_box_to(u32 peers, u32 to, const TensorMap* map, int column, int row, u32 barrier, u64) {
  if (to % 1024) throw std::runtime_error("a box that does not start on a swizzle atom");
  const Cta* from = self().cta;
  if (!(peers >> from->rank & 1)) throw std::runtime_error("a multicast that leaves out its sender");
  if (peers >> machine().ctas.size()) throw std::runtime_error("a multicast to a CTA that is not in the cluster");
  machine().copies.push_back([=] { land(*map, *from, peers, to, column, row, barrier); });
}
void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
  copy_box_to(1u << self().cta->rank, to, map, column, row, barrier, policy);
}

// A descriptor taken apart as the documentation says.
static float element(const Cta& cta, u64 descriptor, u32 row, u32 k) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7)) throw std::runtime_error("a descriptor of another layout");
  const u32 start = in_cta((u32)(descriptor & 0x3fff) << 4, cta.rank);
  const u32 stride = (u32)(descriptor >> 32 & 0x3fff) << 4;
  unsigned short bits;
  std::memcpy(&bits, const_cast<Cta&>(cta).at(swizzled(start + row / 8 * stride + row % 8 * 128 + k * 2), 2), 2);
  return from_bits(bits);
}

void fence_products() {}
void commit_products() { ++self().committed, self().products.push_back(nullptr); }
void await_products(int pending) {
  Fiber& fiber = self();
  // Others go on meanwhile: what they overwrite too early shows in the product.
  machine().yield();
  while (fiber.committed > pending) {
    auto product = fiber.products.front();
    fiber.products.pop_front();
    if (product) product();
    else --fiber.committed;
  }
  // The wait is an instruction of whole warps: no lane passes it before the products of all lanes are done.
  sync_warp();
}
void multiply(float* sums, u32 count, u64 a, u64 b, u32 add) {
  const Fiber& fiber = self();
  const Cta& cta = *fiber.cta;
  const u32 warp = fiber.thread / 32 % 4, lane = fiber.thread % 32;
  self().products.push_back([=, &cta] {
    for (u32 i = 0; i < count; ++i) {
      const u32 row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), token = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = add ? sums[i] : 0;
      for (u32 k = 0; k < 16; ++k) sum += element(cta, a, row, k) * element(cta, b, token, k);
      sums[i] = sum;
    }
  });
}
void settle_products() {
  if (!self().products.empty()) throw std::runtime_error("results that were not awaited");
}

u32 pack(float low, float high) { return to_bits(low) | (u32)to_bits(high) << 16; }
float unpack(unsigned short bits) { return from_bits(bits); }

// Every lane of the warp has shown its registers; lane l's are at [l].
static const u32 (*shown(const u32* registers, u32 count))[6] {
  Cta& cta = *self().cta;
  auto& exchange = cta.exchange[self().exchanges++ % 2];
  for (u32 m = 0; m < count; ++m) exchange[self().thread][m] = registers[m];
  sync_warp();
  return exchange + (self().thread - lane_index());
}

// Lane l holds the address of row l % 8 of matrix l / 8; element (i, j) of a fragment is in lane 4i + j / 2.
static void store_matrices(u32 address, const u32* registers, u32 count) {
  Cta& cta = *self().cta;
  const u32 lane = lane_index();
  const auto* lanes = shown(registers, count);
  if (lane < 8 * count) {
    if (address % 16) throw std::runtime_error("a matrix row that is not aligned");
    for (u32 i = 0; i < 8; ++i) {
      const u32 held = lanes[4 * i + lane % 8 / 2][lane / 8];
      const unsigned short bits = (unsigned short)(held >> (16 * (lane % 2)));
      std::memcpy(cta.at(address + 2 * i, 2), &bits, 2);
    }
  }
  sync_warp();
}
void store_matrices(u32 address, u32 a, u32 b) {
  const u32 registers[2] = {a, b};
  store_matrices(address, registers, 2u);
}
void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const u32 registers[4] = {a, b, c, d};
  store_matrices(address, registers, 4u);
}

// Others go on meanwhile: what they overwrite before all lanes have shown their addresses is read.
static void load_matrices(u32 address, u32* registers, u32 count) {
  const u32 lane = lane_index();
  machine().yield();
  const auto* lanes = shown(&address, 1);
  for (u32 m = 0; m < count; ++m) {
    const u32 row = lanes[8 * m + lane / 4][0];
    if (row % 16) throw std::runtime_error("a matrix row that is not aligned");
    std::memcpy(&registers[m], self().cta->at(row + lane % 4 * 4, 4), 4);
  }
}
void load_matrices(u32 address, u32& a, u32& b) {
  u32 registers[2];
  load_matrices(address, registers, 2u);
  a = registers[0], b = registers[1];
}
void load_matrices(u32 address, u32& a, u32& b, u32& c, u32& d) {
  u32 registers[4];
  load_matrices(address, registers, 4u);
  a = registers[0], b = registers[1], c = registers[2], d = registers[3];
}

// Rows 0-7 and 8-15 of A's first 8 columns are its registers 0 and 1, of the others 2 and 3; those of B are 4 and 5.
void multiply_16x8x16(float& d0, float& d1, float& d2, float& d3, const Words4& a, u32 b_low, u32 b_high) {
  const u32 registers[6] = {a.word[0], a.word[1], a.word[2], a.word[3], b_low, b_high};
  const auto* lanes = shown(registers, 6);
  const u32 lane = lane_index();
  float* sums[4] = {&d0, &d1, &d2, &d3};
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (u32 k = 0; k < 16; ++k) {
      const u32 from_a = lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const u32 from_b = lanes[column * 4 + k % 8 / 2][4 + k / 8];
      const u32 shift = 16 * (k % 2);
      *sums[i] += from_bits((unsigned short)(from_a >> shift)) * from_bits((unsigned short)(from_b >> shift));
    }
  }
}

Words4 load_shared(u32 address) {
  Words4 v;
  std::memcpy(&v, self().cta->at(address, 16), 16);
  return v;
}
void store_global(u64 address, const Words4& v) {
  if (address % 16) throw std::runtime_error("a 16-byte store that is not aligned");
  for (u32 i = 0; i < 8; ++i) machine().store(address + 2 * i, (unsigned short)(v.word[i / 2] >> (16 * (i % 2))));
}
unsigned short load_element(u64 address) {
  unsigned short bits;
  std::memcpy(&bits, (const void*)address, 2);
  return bits;
}
void store_element(u64 address, unsigned short bits) { machine().store(address, bits); }
void add_to(u64 address, u64 amount) { *(u64*)address += amount; }

}  // namespace penstock
