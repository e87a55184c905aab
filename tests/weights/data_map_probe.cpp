// Prints what ExecuTorch's own runtime finds in a .ptd file: one line per key, which is
//   key <tab> scalar type or - <tab> sizes <tab> dim order <tab> bytes in hexadecimal
// The keys given after the file's name have no tensor layout: the runtime does not survive being asked for one.

#include <cstdint>
#include <cstdio>
#include <cstring>

#include <executorch/extension/data_loader/file_data_loader.h>
#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/extension/flat_tensor/flat_tensor_data_map.h>
#include <executorch/runtime/platform/runtime.h>

using executorch::extension::FlatTensorDataMap;

static bool has_layout(const char* key, int count, char** without) {
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(key, without[i]) == 0) {
      return false;
    }
  }
  return true;
}

template <typename Numbers>
static void print_numbers(const Numbers& numbers) {
  std::printf("\t");
  for (size_t i = 0; i < numbers.size(); ++i) {
    std::printf(i ? ",%d" : "%d", static_cast<int>(numbers[i]));
  }
}

template <typename Loader>
static int print_map(Loader loader, int count, char** without) {
  if (!loader.ok()) {
    return 2;
  }
  auto map = FlatTensorDataMap::load(&loader.get());
  if (!map.ok()) {
    return 3;
  }
  for (uint32_t i = 0; i < map->get_num_keys().get(); ++i) {
    const char* key = map->get_key(i).get();
    std::printf("%s", key);
    if (has_layout(key, count, without)) {
      auto layout = map->get_tensor_layout(key);
      if (!layout.ok()) {
        return 4;
      }
      std::printf("\t%d", static_cast<int>(layout->scalar_type()));
      print_numbers(layout->sizes());
      print_numbers(layout->dim_order());
    } else {
      std::printf("\t-\t\t");
    }
    auto data = map->get_data(key);
    if (!data.ok()) {
      return 5;
    }
    std::printf("\t");
    for (size_t at = 0; at < data->size(); ++at) {
      std::printf("%02x", static_cast<const uint8_t*>(data->data())[at]);
    }
    std::printf("\n");
  }
  return 0;
}

int main(int argc, char** argv) {
  executorch::runtime::runtime_init();
  const bool mapped = std::strcmp(argv[1], "mmap") == 0;
  return mapped ? print_map(executorch::extension::MmapDataLoader::from(argv[2]), argc - 3, argv + 3)
                : print_map(executorch::extension::FileDataLoader::from(argv[2]), argc - 3, argv + 3);
}
