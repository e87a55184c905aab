// Cuts a file into chunks at the ends of its weights.
#include "open/chunks.h"

#include <algorithm>
#include <string>
#include <utility>

#include "driver/driver.h"

namespace penstock {
namespace {

using Span = std::pair<int64_t, int64_t>;

int64_t page_up(int64_t bytes, int64_t page_bytes) { return (bytes + page_bytes - 1) / page_bytes * page_bytes; }

// The pages of the extents as (start, end). Extents that share a page make one span.
std::vector<Span> page_spans(std::vector<FileExtent> extents, int64_t page_bytes) {
  std::sort(extents.begin(), extents.end(),
            [](const FileExtent& a, const FileExtent& b) { return a.offset_bytes < b.offset_bytes; });
  std::vector<Span> spans;
  for (const FileExtent& extent : extents) {
    if (!extent.bytes) continue;
    const int64_t start = extent.offset_bytes / page_bytes * page_bytes;
    const int64_t end = page_up(extent.offset_bytes + extent.bytes, page_bytes);
    if (!spans.empty() && start < spans.back().second)
      spans.back().second = std::max(spans.back().second, end);
    else
      spans.emplace_back(start, end);
  }
  return spans;
}

}  // namespace

std::vector<size_t> chunk_ends(const std::vector<FileExtent>& extents, int64_t file_bytes, int64_t limit_bytes,
                               int64_t page_bytes) {
  if (limit_bytes < page_bytes)
    throw CoreError(Failure::usage, "a chunk of at most " + std::to_string(limit_bytes) +
                                      " bytes is smaller than a page of " + std::to_string(page_bytes) + " bytes");
  const int64_t whole = page_up(file_bytes, page_bytes);
  const std::vector<Span> spans = page_spans(extents, page_bytes);
  std::vector<size_t> ends;
  int64_t start = 0;
  size_t at = 0;
  while (whole - start > limit_bytes) {
    int64_t end = (start + limit_bytes) / page_bytes * page_bytes;
    while (at < spans.size() && spans[at].second <= end) ++at;
    // The limit falls inside a weight: end before it, or after it if the chunk begins with it.
    if (at < spans.size() && spans[at].first < end) end = spans[at].first > start ? spans[at].first : spans[at].second;
    ends.push_back((size_t)end);
    start = end;
  }
  if (start < whole) ends.push_back((size_t)whole);
  return ends;
}

}  // namespace penstock
