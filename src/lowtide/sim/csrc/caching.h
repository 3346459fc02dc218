// A model of a caching allocator: how much it reserves from the device for what was asked of it.
//
// Models torch's CUDA allocator with its default settings: requests rounded to 512 bytes; up to 1 MiB from segments
// of 2 MiB; up to 10 MiB from segments of 20 MiB; larger from segments rounded to 2 MiB. Best fit, split, merge with
// free neighbours, one pool a stream. Addresses are numbers: no memory lies behind them.
#pragma once

#include <set>

#include "state.h"

namespace lowtide_sim {

class CachingModel {
 public:
  static constexpr size_t kSmall = 1 << 20, kSmallSegment = 2 << 20, kLarge = 10 << 20, kLargeSegment = 20 << 20,
                          kRound = 2 << 20, kMinimum = 512;

  size_t reserved = 0, peak_reserved = 0;

  // The address of a new piece, or 0 where the device has no room for another segment.
  uint64_t take(size_t bytes, int stream, size_t capacity) {
    bool small = bytes <= kSmall;
    auto found = best_fit(bytes, stream, small);
    if (!found) {
      size_t segment = segment_bytes(bytes);
      if (reserved + segment > capacity) {
        give_back();
        if (reserved + segment > capacity) {
          return 0;
        }
      }
      found = new_segment(segment, stream, small);
    }
    split(found, bytes, small);
    pieces_[found].used = true;
    return found;
  }

  void give(uint64_t address) {
    auto it = pieces_.find(address);
    it->second.used = false;
    auto after = std::next(it);
    if (after != pieces_.end() && joins(it->second, after->second, it->first, after->first)) {
      it->second.bytes += after->second.bytes;
      pieces_.erase(after);
    }
    if (it != pieces_.begin()) {
      auto before = std::prev(it);
      if (joins(before->second, it->second, before->first, it->first)) {
        before->second.bytes += it->second.bytes;
        pieces_.erase(it);
      }
    }
  }

  // Return every segment that is wholly free to the device.
  void give_back() {
    for (auto it = pieces_.begin(); it != pieces_.end();) {
      bool whole = !it->second.used && it->second.bytes == segments_.at(it->second.segment);
      if (whole) {
        reserved -= it->second.bytes;
        segments_.erase(it->second.segment);
        it = pieces_.erase(it);
      } else {
        ++it;
      }
    }
  }

 private:
  struct Piece {
    size_t bytes;
    uint64_t segment;
    int stream;
    bool small, used;
  };

  static size_t segment_bytes(size_t bytes) {
    if (bytes <= kSmall) {
      return kSmallSegment;
    }
    return bytes < kLarge ? kLargeSegment : (bytes + kRound - 1) / kRound * kRound;
  }

  static bool joins(const Piece& left, const Piece& right, uint64_t left_at, uint64_t right_at) {
    return !left.used && !right.used && left.segment == right.segment && left_at + left.bytes == right_at;
  }

  uint64_t best_fit(size_t bytes, int stream, bool small) const {
    uint64_t best = 0;
    size_t best_bytes = SIZE_MAX;
    for (const auto& [address, piece] : pieces_) {
      if (!piece.used && piece.stream == stream && piece.small == small && piece.bytes >= bytes &&
          piece.bytes < best_bytes) {
        best = address;
        best_bytes = piece.bytes;
      }
    }
    return best;
  }

  uint64_t new_segment(size_t bytes, int stream, bool small) {
    uint64_t address = next_;
    next_ += bytes + kRound;
    segments_[address] = bytes;
    pieces_[address] = {bytes, address, stream, small, false};
    reserved += bytes;
    peak_reserved = std::max(peak_reserved, reserved);
    return address;
  }

  void split(uint64_t address, size_t bytes, bool small) {
    auto& piece = pieces_[address];
    size_t rest = piece.bytes - bytes;
    if (small ? rest >= kMinimum : rest > kSmall) {
      auto other = piece;
      other.bytes = rest;
      piece.bytes = bytes;
      pieces_[address + bytes] = other;
    }
  }

  std::map<uint64_t, Piece> pieces_; // by address
  std::map<uint64_t, size_t> segments_;
  uint64_t next_ = kRound;
};

} // namespace lowtide_sim
