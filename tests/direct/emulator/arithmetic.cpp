// The kernel's arithmetic and the layout of its parameters, for comparison with their mirrors in Python.
#include <cstddef>

#include "descriptor.h"
#include "split_params.h"
#include "split_schedule.h"

using penstock::SplitParams;
using penstock::SplitSchedule;

extern "C" {

int chunk() { return penstock::kChunk; }
int grain() { return penstock::kGrain; }

void item(const SplitSchedule* schedule, int cluster, int step, int* out) {
  const penstock::SplitItem found = penstock::split_item(*schedule, cluster, step);
  out[0] = found.band;
  out[1] = found.token_block;
}

int host_bytes(const SplitSchedule* schedule, int depth, int row, int count, int column) {
  return penstock::split_host_bytes(*schedule, depth, row, count, column);
}

struct Field {
  const char* name;
  size_t offset;
};

#define FIELD(name) {#name, offsetof(SplitParams, name)}
static const Field fields[] = {
    FIELD(x), FIELD(prefix), FIELD(rest), FIELD(prefix_16), FIELD(rest_16),
    FIELD(y_address), FIELD(bias_address), FIELD(host_bytes_address), FIELD(fault_address),
    FIELD(schedule), FIELD(tokens), FIELD(depth), FIELD(y_stride), FIELD(token_ctas), FIELD(row_ctas), FIELD(w_stages), FIELD(x_stages), FIELD(host_w_stages),
    FIELD(schedule.split_row), FIELD(schedule.rows), FIELD(schedule.cluster_rows), FIELD(schedule.token_blocks),
    FIELD(schedule.clusters), FIELD(schedule.host_clusters), FIELD(schedule.helped)};

int field_count() { return (int)(sizeof(fields) / sizeof(fields[0])); }
const char* field_name(int index) { return fields[index].name; }
int field_offset(int index) { return (int)fields[index].offset; }
int params_bytes() { return (int)sizeof(SplitParams); }
int params_alignment() { return (int)alignof(SplitParams); }
}
