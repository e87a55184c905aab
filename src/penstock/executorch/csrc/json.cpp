#include "json.h"

#include <cerrno>
#include <cstdlib>

#include "load_error.h"

namespace penstock_executorch {
namespace {

[[noreturn]] void damaged(const std::string& what) {
  throw LoadError(::penstock_executorch::Kind::package, "the program's description is damaged: " + what);
}

constexpr int kDeepest = 32;

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += (char)code;
  } else if (code < 0x800) {
    out += (char)(0xC0 | code >> 6);
    out += (char)(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += (char)(0xE0 | code >> 12);
    out += (char)(0x80 | (code >> 6 & 0x3F));
    out += (char)(0x80 | (code & 0x3F));
  } else {
    out += (char)(0xF0 | code >> 18);
    out += (char)(0x80 | (code >> 12 & 0x3F));
    out += (char)(0x80 | (code >> 6 & 0x3F));
    out += (char)(0x80 | (code & 0x3F));
  }
}

}  // namespace

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : text_(text) {}

  Json whole() {
    Json value = next(0);
    skip();
    if (at_ != text_.size()) damaged("there is text after its end");
    return value;
  }

 private:
  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
      ++at_;
  }
  char peek() {
    skip();
    if (at_ >= text_.size()) damaged("it ends early");
    return text_[at_];
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) damaged(std::string("'") + c + "' is missing at byte " + std::to_string(at_));
  }
  void word(const char* letters) {
    for (const char* c = letters; *c; ++c)
      if (at_ >= text_.size() || text_[at_++] != *c) damaged("an unknown word at byte " + std::to_string(at_));
  }

  Json next(int depth) {
    if (depth > kDeepest) damaged("it is nested too deeply");
    Json value;
    switch (peek()) {
      case '{':
        value.kind_ = Json::Kind::table;
        ++at_;
        if (take('}')) return value;
        do {
          peek();
          std::string key = quoted();
          expect(':');
          if (!value.table_.emplace(key, next(depth + 1)).second) damaged("it has '" + key + "' twice");
        } while (take(','));
        expect('}');
        return value;
      case '[':
        value.kind_ = Json::Kind::list;
        ++at_;
        if (take(']')) return value;
        do value.list_.push_back(next(depth + 1));
        while (take(','));
        expect(']');
        return value;
      case '"':
        value.kind_ = Json::Kind::string;
        value.string_ = quoted();
        return value;
      case 'n':
        word("null");
        return value;
      case 't':
      case 'f':
        value.kind_ = Json::Kind::boolean;
        value.integer_ = text_[at_] == 't';
        word(value.integer_ ? "true" : "false");
        return value;
      default:
        return number();
    }
  }

  Json number() {
    size_t start = at_;
    bool whole = true;
    while (at_ < text_.size() && std::string("+-0123456789.eE").find(text_[at_]) != std::string::npos) {
      if (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E') whole = false;
      ++at_;
    }
    std::string digits = text_.substr(start, at_ - start);
    Json value;
    value.kind_ = whole ? Json::Kind::integer : Json::Kind::number;
    errno = 0;
    char* end = nullptr;
    if (whole) value.integer_ = std::strtoll(digits.c_str(), &end, 10);
    else std::strtod(digits.c_str(), &end);
    if (digits.empty() || *end || errno) damaged("no number at byte " + std::to_string(start));
    return value;
  }

  uint32_t hex4() {
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i) {
      if (at_ >= text_.size()) damaged("it ends inside a string");
      char c = text_[at_++];
      uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                       : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                       : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10)
                                              : 16;
      if (digit > 15) damaged("a string has an escape that is none");
      code = code * 16 + digit;
    }
    return code;
  }

  std::string quoted() {
    expect('"');
    std::string out;
    while (true) {
      if (at_ >= text_.size()) damaged("it ends inside a string");
      char c = text_[at_++];
      if (c == '"') return out;
      if (c != '\\') {
        out += c;
        continue;
      }
      if (at_ >= text_.size()) damaged("it ends inside a string");
      char escaped = text_[at_++];
      size_t known = std::string("\"\\/bfnrt").find(escaped);
      if (known != std::string::npos) {
        out += "\"\\/\b\f\n\r\t"[known];
      } else if (escaped == 'u') {
        uint32_t code = hex4();
        if (code >= 0xD800 && code < 0xDC00) {
          if (at_ + 1 >= text_.size() || text_[at_] != '\\' || text_[at_ + 1] != 'u') damaged("half a character");
          at_ += 2;
          uint32_t low = hex4();
          if (low < 0xDC00 || low > 0xDFFF) damaged("half a character");
          code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        } else if (code >= 0xDC00 && code <= 0xDFFF) {
          damaged("half a character");
        }
        append_utf8(out, code);
      } else {
        damaged("a string has an escape that is none");
      }
    }
  }

  const std::string& text_;
  size_t at_ = 0;
};

Json Json::parse(const std::string& text) { return JsonReader(text).whole(); }

int64_t Json::integer() const {
  if (kind_ != Kind::integer) damaged("something is not a whole number");
  return integer_;
}

const std::string& Json::string() const {
  if (kind_ != Kind::string) damaged("something is not text");
  return string_;
}

const std::vector<Json>& Json::list() const {
  if (kind_ != Kind::list) damaged("something is not a list");
  return list_;
}

std::vector<int64_t> Json::integers() const {
  std::vector<int64_t> out;
  for (const Json& item : list()) out.push_back(item.integer());
  return out;
}

const Json& Json::at(const std::string& key) const {
  auto found = table_.find(key);
  if (kind_ != Kind::table || found == table_.end()) damaged("it has no '" + key + "'");
  return found->second;
}

}  // namespace penstock_executorch
