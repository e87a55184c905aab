// As much of JSON as our own descriptions hold. Anything else is refused, and so is a field that is not there.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace penstock_executorch {

class Json {
 public:
  // Throws LoadError(package), also for text after the end.
  static Json parse(const std::string& text);

  bool is_null() const { return kind_ == Kind::null; }
  int64_t integer() const;
  const std::string& string() const;
  const std::vector<Json>& list() const;
  std::vector<int64_t> integers() const;
  const Json& at(const std::string& key) const;
  // Nothing else than a table has any.
  bool has(const std::string& key) const { return table_.count(key) != 0; }

 private:
  enum class Kind { null, boolean, integer, number, string, list, table };
  friend class JsonReader;

  Kind kind_ = Kind::null;
  int64_t integer_ = 0;
  std::string string_;
  std::vector<Json> list_;
  std::map<std::string, Json> table_;
};

}  // namespace penstock_executorch
