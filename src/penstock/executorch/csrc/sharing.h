// What delegates that are loaded one after the other share: a session, or state. Each has a place at it, and it is
// destroyed with the last place.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace penstock_executorch {

// Key: what delegates must have in common. A tuple whose fourth part is the group that was named at load.
template <typename Key, typename Thing>
class Sharing {
  struct Shared {
    std::shared_ptr<Thing> thing;
    // Of what was made outside: the delegates that have a place, by number; empty: every delegate.
    std::vector<int64_t> places{};
    // Delegates that have a place now.
    std::set<int64_t> taken{};
  };

 public:
  class Place {
   public:
    Place(Sharing& all, std::shared_ptr<Shared> shared, int64_t method, int64_t number, std::optional<Key> key)
        : all_(all), shared_(std::move(shared)), method_(method), number_(number), key_(std::move(key)) {}
    ~Place() { all_.leave(*this); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    Thing& operator*() const { return *shared_->thing; }
    Thing* operator->() const { return shared_->thing.get(); }
    // The delegate's number, as the thing counts.
    int64_t number() const { return number_; }

   private:
    friend Sharing;
    Sharing& all_;
    std::shared_ptr<Shared> shared_;
    int64_t method_;
    int64_t number_;
    std::optional<Key> key_;  // none: it was made outside
  };
  using PlaceRef = std::unique_ptr<Place>;

  // Joins what other delegates of the same load made, if delegate `method` has no place there yet; else has it made.
  template <typename Make>
  PlaceRef take(const Key& key, int64_t method, int64_t number, Make&& make) {
    std::unique_lock<std::mutex> hold(lock_);
    changed_.wait(hold, [&] { return !busy_.count(key); });
    auto [begin, end] = made_.equal_range(key);
    for (auto it = begin; it != end; ++it)
      if (it->second->taken.insert(method).second)
        return std::make_unique<Place>(*this, it->second, method, number, key);
    auto shared = std::make_shared<Shared>();
    busy_with(key, hold, [&] { shared->thing = make(); });
    shared->taken.insert(method);
    made_.emplace(key, shared);
    return std::make_unique<Place>(*this, std::move(shared), method, number, key);
  }

  // Shares something that was made outside: delegate `places[i]` of the group uses it, and is number i there.
  void share(const std::string& group, std::shared_ptr<Thing> thing, std::vector<int64_t> places) {
    std::lock_guard<std::mutex> hold(lock_);
    outside_.emplace(group, std::make_shared<Shared>(Shared{std::move(thing), std::move(places)}));
  }
  void reclaim(const std::string& group) {
    std::lock_guard<std::mutex> hold(lock_);
    outside_.erase(group);
  }
  // Null if nothing from outside is shared with this delegate of the group.
  PlaceRef take_shared(const std::string& group, int64_t method) {
    std::lock_guard<std::mutex> hold(lock_);
    auto [begin, end] = outside_.equal_range(group);
    for (auto it = begin; it != end; ++it) {
      const std::vector<int64_t>& places = it->second->places;
      auto found = std::find(places.begin(), places.end(), method);
      if (places.empty() || found != places.end())
        return std::make_unique<Place>(*this, it->second, method, found - places.begin(), std::nullopt);
    }
    return nullptr;
  }
  bool is_shared(const std::string& group) {
    std::lock_guard<std::mutex> hold(lock_);
    return outside_.count(group) != 0;
  }

  // What was made for a group. Whoever gives one up waits until the caller of this lets it go.
  std::vector<std::shared_ptr<Thing>> find(const std::string& group) {
    std::vector<std::shared_ptr<Thing>> found;
    std::lock_guard<std::mutex> hold(lock_);
    found.reserve(made_.size());  // so that nothing found is let go under the lock
    for (auto& [key, shared] : made_)
      if (std::get<3>(key) == group) found.push_back(asked(shared->thing));
    return found;
  }

 private:
  struct Asked {
    Sharing& all;
    std::shared_ptr<Thing> thing;
    ~Asked() {
      std::lock_guard<std::mutex> hold(all.lock_);
      thing.reset();
      all.changed_.notify_all();
    }
  };
  std::shared_ptr<Thing> asked(const std::shared_ptr<Thing>& thing) {
    const auto holds = std::make_shared<Asked>(*this, thing);
    return {holds, holds->thing.get()};
  }

  void leave(Place& place) {
    std::unique_lock<std::mutex> hold(lock_);
    place.shared_->taken.erase(place.method_);
    if (!place.key_) return;
    // Somebody may join while this waits, or take it down.
    changed_.wait(hold, [&] { return !busy_.count(*place.key_); });
    if (!place.shared_->taken.empty() || !place.shared_->thing) return;
    std::erase_if(made_, [&](const auto& each) { return each.second == place.shared_; });
    busy_with(*place.key_, hold, [&] { give_up(place.shared_->thing); });
  }

  // Nobody finds it any more, but whoever found it before still uses what the next one with this key would have.
  void give_up(std::shared_ptr<Thing>& thing) {
    {
      std::unique_lock<std::mutex> hold(lock_);
      changed_.wait(hold, [&] { return thing.use_count() == 1; });
    }
    thing.reset();
  }

  // Does slow work, such as reading weights, without the lock. Whoever wants one of the same key waits until it has
  // ended. So no budget is taken twice, and no other program is held up.
  template <typename Work>
  void busy_with(const Key& key, std::unique_lock<std::mutex>& hold, Work&& work) {
    busy_.insert(key);
    hold.unlock();
    struct Ends {
      Sharing& all;
      const Key& key;
      std::unique_lock<std::mutex>& hold;
      ~Ends() {
        hold.lock();
        all.busy_.erase(key);
        all.changed_.notify_all();
      }
    } ends{*this, key, hold};
    work();
  }

  std::mutex lock_;
  std::multimap<Key, std::shared_ptr<Shared>> made_;
  std::multimap<std::string, std::shared_ptr<Shared>> outside_;
  // Keys of what is being made or given up.
  std::set<Key> busy_;
  std::condition_variable changed_;
};

}  // namespace penstock_executorch
