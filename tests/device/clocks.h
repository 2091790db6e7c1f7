// Vector clocks: which work of a stream is known to be done, and which accesses to memory are races.
//
// A kernel computes its values at once, but counts as done only for those that are ordered behind it: the same stream,
// a stream that waits for an event, or the host once it has synchronized. All threads of the host share one clock.
#pragma once

#include <Python.h>
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace toy {

// Guards all state of this device. A thread that has to wait for it lets go of Python's lock, which the owner may need.
inline std::recursive_mutex state_mutex;

class Lock {
 public:
  Lock() {
    if (state_mutex.try_lock()) return;
    PyThreadState* thread = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    state_mutex.lock();
    if (thread) PyEval_RestoreThread(thread);
  }
  ~Lock() { state_mutex.unlock(); }
  Lock(const Lock&) = delete;
};

// For each stream, how much of its work is done. Streams are numbered over all devices.
using StreamNumber = int64_t;

struct Clock {
  std::vector<uint64_t> times;

  uint64_t at(StreamNumber stream) const { return stream < (int64_t)times.size() ? times[stream] : 0; }
  void set(StreamNumber stream, uint64_t time) {
    if ((int64_t)times.size() <= stream) times.resize(stream + 1);
    times[stream] = time;
  }
  void join(const Clock& other) {
    if (times.size() < other.times.size()) times.resize(other.times.size());
    for (size_t i = 0; i < other.times.size(); i++) times[i] = std::max(times[i], other.times[i]);
  }
};

inline Clock host_clock;
inline std::map<StreamNumber, Clock> stream_clocks;

// The clock of a stream. Work that is issued to it begins after everything that the host knows to be done.
inline Clock& clock_of(StreamNumber stream) {
  Clock& clock = stream_clocks[stream];
  if (!clock.at(stream)) clock.set(stream, 1);
  clock.join(host_clock);
  return clock;
}

// Ends the present section of a stream's work, and returns the clock of those that wait for it.
inline Clock end_section(StreamNumber stream) {
  Clock& clock = clock_of(stream);
  Clock behind = clock;
  clock.set(stream, clock.at(stream) + 1);
  return behind;
}

// What was found, with how often it came.
inline std::map<std::string, int> reports;
inline void report(const std::string& text) { reports[text]++; }

// The operator that this thread issues, and the lines of the package that called it.
inline thread_local int operator_depth = 0;
inline thread_local std::string operator_name, operator_place;

// The innermost lines of the package and of its tests. It takes Python's lock: never call it with `Lock` held.
inline std::string place_in_python() {
  if (!Py_IsInitialized()) return "";
  PyGILState_STATE state = PyGILState_Ensure();
  std::string found;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (int lines = 0; frame && lines < 4;) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const char* inside = file ? strstr(file, "hf_zero/") : nullptr;
    if (!inside && file) inside = strstr(file, "tests/");
    if (inside) {
      found += (lines++ ? " < " : "") + std::string(inside) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    }
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(code);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  PyGILState_Release(state);
  return found;
}

// Names the operator as long as the object lives. Operators that it calls are parts of the same kernel.
class Operator {
 public:
  explicit Operator(const std::string& name) {
    if (operator_depth++ == 0) {
      operator_name = name;
      operator_place = place_in_python();
    }
  }
  ~Operator() { operator_depth--; }
  static bool is_inner() { return operator_depth > 1; }
};

inline std::string here() { return operator_name + " at " + operator_place; }

struct Access {
  StreamNumber stream = -1;
  uint64_t time = 0;
  std::string what;

  bool is_unordered_before(StreamNumber other, const Clock& clock) const {
    return stream >= 0 && stream != other && time > clock.at(stream);
  }
};

// The last write to a range of addresses, and the reads since, by stream.
struct Range {
  uintptr_t end;
  Access write;
  std::map<StreamNumber, Access> reads;
};

inline std::map<uintptr_t, Range> history;  // by first address

inline void split_history(uintptr_t address) {
  auto next = history.upper_bound(address);
  if (next == history.begin()) return;
  auto [start, range] = *std::prev(next);
  if (start < address && address < range.end) {
    history[start].end = address;
    history[address] = range;
  }
}

inline void forget_history(const void* memory, size_t nbytes) {
  uintptr_t begin = (uintptr_t)memory, end = begin + nbytes;
  split_history(begin);
  split_history(end);
  history.erase(history.lower_bound(begin), history.lower_bound(end));
}

// Notes that a stream reads or writes memory, and reports accesses that are not ordered before it.
inline void note_access(const void* memory, size_t nbytes, StreamNumber stream, bool writes) {
  if (!nbytes) return;
  uintptr_t begin = (uintptr_t)memory, end = begin + nbytes;
  const Clock& clock = clock_of(stream);
  Access access{stream, clock.at(stream), here()};
  split_history(begin);
  split_history(end);
  auto note = [&](Range& range) {
    if (range.write.is_unordered_before(stream, clock)) {
      report(std::string("race: ") + (writes ? "write" : "read") + " after write: " + access.what +
             " || earlier: " + range.write.what);
    }
    if (!writes) {
      range.reads[stream] = access;
      return;
    }
    for (auto& [reader, read] : range.reads) {
      if (read.is_unordered_before(stream, clock)) {
        report("race: write after read: " + access.what + " || earlier: " + read.what);
      }
    }
    range.write = access;
    range.reads.clear();
  };
  for (uintptr_t at = begin; at < end;) {
    auto known = history.lower_bound(at);
    if (known == history.end() || known->first > at) {  // nobody has touched this part
      uintptr_t gap_end = known == history.end() ? end : std::min(end, known->first);
      known = history.emplace(at, Range{gap_end, {}, {}}).first;
    }
    note(known->second);
    at = known->second.end;
  }
}

}  // namespace toy
