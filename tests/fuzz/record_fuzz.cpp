// Records changed at random, and what has one behind a header, read as the core and the ExecuTorch delegate read them. Each is refused by the reader's own
// error, or is a plan that the check accepts or refuses; whatever else happens ends the program. For builds with
// sanitizers, and nothing may ask for more memory at once than a multiple of what the record has.
//
//   record_fuzz CORPUS CASES SEED WEIGHT_BYTES...
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "core.h"
#include "driver/driver.h"
#include "load_error.h"
#include "packed/packed_records.h"
#include "packed_entry.h"
#include "payload.h"
#include "penstock_records.h"
#include "plan/plan_check.h"
#include "plan/plan_records.h"

namespace penstock_executorch {

// Of the core these readers ask for nothing else.
const Core& core() {
  static const Core made = [] {
    Core found{};
    found.checksum = penstock_checksum;
    return found;
  }();
  return made;
}

}  // namespace penstock_executorch

namespace {

using Numbers = std::vector<int64_t>;
using penstock_executorch::Kind;

// How what has a header of its own is read, and by which errors it may be refused.
struct Reader {
  std::function<void(const Numbers&)> read;
  std::vector<Kind> refusals = {Kind::package};
  // Whether its third number is a checksum of all that follows.
  bool is_sealed = false;
};
using Random = std::mt19937_64;

constexpr int64_t kPageBytes = 4096;
constexpr size_t kMostBytesAtOnce = 1 << 20;
bool is_reading = false;

Numbers corpus(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Numbers found(bytes.size() / sizeof(int64_t));
  std::memcpy(found.data(), bytes.data(), found.size() * sizeof(int64_t));
  return found;
}

size_t size_of(const Numbers& numbers) { return numbers.size() * sizeof(int64_t); }

int64_t odd_number(Random& random) {
  constexpr int64_t kCorners[] = {0, 1, -1, -2, 2, 7, 255, 4096, 4095, 65536, INT32_MAX, int64_t{1} << 32, int64_t{1} << 40,
                                  int64_t{1} << 56, INT64_MAX, INT64_MAX - 1, INT64_MAX - 4096, INT64_MIN, INT64_MIN + 1,
                                  INT64_MAX / 8, INT64_MAX / 2};
  return kCorners[random() % std::size(kCorners)];
}

Numbers damaged(Random& random, const Numbers& sound) {
  Numbers out = sound;
  for (uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
    const size_t at = out.empty() ? 0 : random() % out.size();
    const uint64_t kind = out.empty() ? 0 : random() % 8;
    // Modulo 2^64: what an attacker may write.
    if (kind == 0) out.insert(out.begin() + (ptrdiff_t)at, odd_number(random));
    else if (kind == 1) out[at] = odd_number(random);
    else if (kind == 2) out[at] = (int64_t)((uint64_t)out[at] + (uint64_t)odd_number(random));
    else if (kind == 3) out[at] = out[random() % out.size()];
    else if (kind == 4) std::swap(out[at], out[random() % out.size()]);
    else if (kind == 5) out[at] = (int64_t)((uint64_t)out[at] ^ (uint64_t{1} << random() % 64));
    else if (kind == 6) out.erase(out.begin() + (ptrdiff_t)at);
    else if (random() % 4 == 0) out.resize(at);
    else out[at] += out[at] < 1 << 20 && out[at] > -(1 << 20) ? (int64_t)(random() % 3) - 1 : 0;
  }
  return out;
}

[[noreturn]] void fail(const std::string& what, const Numbers& numbers) {
  is_reading = false;
  std::fprintf(stderr, "%s:", what.c_str());
  for (int64_t number : numbers) std::fprintf(stderr, " %lld", (long long)number);
  std::fprintf(stderr, "\n");
  std::_Exit(1);
}

}  // namespace

void* operator new(size_t bytes) {
  if (is_reading && bytes > kMostBytesAtOnce) {
    is_reading = false;
    std::fprintf(stderr, "%zu bytes were asked for at once\n", bytes);
    std::abort();
  }
  if (void* made = std::malloc(bytes)) return made;
  throw std::bad_alloc();
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete(void* made, size_t) noexcept { std::free(made); }

int main(int count, char** arguments) {
  using namespace penstock;
  if (count < 5) return 2;
  const std::string folder = arguments[1];
  const long cases = std::atol(arguments[2]);
  Random random((uint64_t)std::atoll(arguments[3]));
  Numbers weight_bytes;
  for (int i = 4; i < count; ++i) weight_bytes.push_back(std::atoll(arguments[i]));
  std::vector<FileExtent> extents;
  for (int64_t bytes : weight_bytes) extents.push_back({0, bytes * 16});
  const WeightPlaces places("corpus", extents, INT64_MAX);

  const auto plan = [&](const Numbers& numbers) {
    PlanRecord found = read_plan(numbers.data(), numbers.size(), weight_bytes);
    check_plan(found, kPageBytes);
    // As the delegate has it: a plan for weights as they are, and slots in memory of their own.
    if (!found.slots) {
      add_slots(found, 1 + (int64_t)(random() % 3), 1 + (int64_t)(random() % 8) * 256, 2 * kPageBytes);
      check_plan(found, kPageBytes);
    }
  };
  // What changed plans for packed weights are read for.
  const Numbers payload_bytes = corpus(folder + "/payload.record");
  const auto payload = penstock_executorch::read_payload(payload_bytes.data(), size_of(payload_bytes));
  penstock_executorch::PackedWeights packed;
  packed.numbers = corpus(folder + "/packed.record");
  const penstock_executorch::WeightFacts halves{"halves", {"halves"}, 15, {32776}, {0}, 65552};

  std::map<std::string, Reader> readers;
  for (const char* name : {"plan-0", "plan-1", "plan-2", "plan-3", "plan-4"}) readers[name] = {plan};
  readers["lru"] = {[&](const Numbers& numbers) { read_lru(numbers.data(), numbers.size(), weight_bytes); }};
  readers["packed"] = {[&](const Numbers& numbers) { read_packed(numbers.data(), numbers.size(), places); }};
  readers["description"] = {
      [](const Numbers& numbers) { penstock_executorch::read_description(numbers.data(), size_of(numbers)); }};
  readers["payload"] = {
      [](const Numbers& numbers) { penstock_executorch::read_payload(numbers.data(), size_of(numbers)); },
      {Kind::package},
      true};
  readers["delegate-ref"] = {
      [](const Numbers& numbers) { penstock_executorch::read_delegate_ref(numbers.data(), size_of(numbers)); },
      {Kind::package},
      true};
  readers["packed-plans"] = {
      [&](const Numbers& numbers) {
        penstock_executorch::read_packed_plans(numbers.data(), size_of(numbers), payload, packed);
      },
      {Kind::weights_file},
      true};
  readers["packed-entry"] = {
      [&](const Numbers& numbers) {
        using namespace penstock_executorch;
        // Any other is taken for a weight that is not packed, and its length is judged as that of one.
        if (!is_packed_entry(halves, numbers.data(), size_of(numbers))) throw RecordError("not packed");
        read_packed_entry(halves.name, halves, numbers.data(), size_of(numbers));
      },
      {Kind::weights_file, Kind::weight_mismatch}};

  for (const auto& [name, reader] : readers) {
    const Numbers sound = corpus(folder + "/" + name + ".record");
    long by_reader = 0, by_check = 0, accepted = 0;
    for (long number = 0; number < cases / (long)readers.size() + 1; ++number) {
      // Of exactly its size, so that a sanitizer sees what is read behind it. The first is as it stands.
      Numbers changed = number ? damaged(random, sound) : sound;
      // By who computes the checksum anew, or by chance.
      if (reader.is_sealed && changed.size() > 3 && random() % 4)
        changed[2] = (int64_t)penstock_checksum(changed.data() + 3, (int64_t)size_of(changed) - 24);
      const Numbers numbers(changed.begin(), changed.end());
      is_reading = true;
      try {
        reader.read(numbers);
        ++accepted;
      } catch (const RecordError&) {
        ++by_reader;
      } catch (const penstock_executorch::LoadError& error) {
        if (std::find(reader.refusals.begin(), reader.refusals.end(), error.kind) == reader.refusals.end())
          fail(name + " was refused as something else", numbers);
        ++by_reader;
      } catch (const CoreError& error) {
        if (error.failure != Failure::usage) fail(name + " was refused as something else", numbers);
        ++by_check;
      } catch (const std::exception& error) {
        fail(name + " ended in " + error.what(), numbers);
      }
      is_reading = false;
      if (!number && !accepted) fail(name + " is refused as it stands in the corpus", numbers);
    }
    std::printf("%s %ld %ld %ld\n", name.c_str(), by_reader, by_check, accepted);
  }
}
