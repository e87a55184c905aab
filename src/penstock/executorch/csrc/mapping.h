// Leads from an address in a mapped file back to the file. ExecuTorch hands out addresses; copies need the file itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace penstock_executorch {

struct FilePlace {
  std::string path;
  int64_t offset_bytes;
  uint64_t device;
  uint64_t inode;
};

// The mappings of this process at one moment.
class Mappings {
 public:
  Mappings();
  // Throws LoadError(weights_file) where no file lies behind the address; `what` is for the message.
  FilePlace place(const void* address, const std::string& what) const;
  // Name of the file behind the address, without its folders; `otherwise` if there is none.
  std::string file_name(const void* address, const std::string& otherwise) const;

 private:
  struct Line {
    uintptr_t begin, end;
    uint64_t offset, device, inode;
    std::string path;
  };
  // Null where no file lies behind the address.
  const Line* line_of(const void* address) const;

  std::vector<Line> lines_;
};

}  // namespace penstock_executorch
