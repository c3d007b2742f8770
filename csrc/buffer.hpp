// Working memory that keeps its size from call to call and is aligned for vectors.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace ibpo {

template <typename T>
class Buffer {
    static_assert(std::is_trivially_copyable_v<T>);

public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    // Room for `size` entries; what was there is lost when it must grow.
    T* reserve(std::size_t size) {
        if (size > capacity_) {
            std::free(data_);
            data_ = nullptr;
            capacity_ = 0;
            data_ = static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64));
            if (data_ == nullptr) throw std::bad_alloc();
            capacity_ = size;
        }
        return data_;
    }
    T* zeros(std::size_t size) {
        reserve(size);
        std::memset(data_, 0, size * sizeof(T));
        return data_;
    }
    void swap(Buffer& other) {
        std::swap(data_, other.data_);
        std::swap(capacity_, other.capacity_);
    }
    T* data() { return data_; }
    const T* data() const { return data_; }
    T& operator[](std::size_t i) { return data_[i]; }
    const T& operator[](std::size_t i) const { return data_[i]; }
    std::size_t bytes() const { return capacity_ * sizeof(T); }

private:
    T* data_ = nullptr;
    std::size_t capacity_ = 0;
};

// A list that grows: room for some more is made before they are written, and only then are they counted.
template <typename T>
class Growing {
    static_assert(std::is_trivially_copyable_v<T>);

public:
    Growing() = default;
    Growing(Growing&& other) noexcept : data_(other.data_), size_(other.size_), capacity_(other.capacity_) {
        other.data_ = nullptr;
        other.size_ = other.capacity_ = 0;
    }
    Growing(const Growing&) = delete;
    Growing& operator=(const Growing&) = delete;
    ~Growing() { std::free(data_); }

    // Where up to `count` more may be written.
    T* room(std::size_t count) {
        if (size_ + count > capacity_) {
            const std::size_t capacity = size_ + size_ / 2 + count;
            void* data = std::realloc(data_, capacity * sizeof(T));
            if (data == nullptr) throw std::bad_alloc();
            data_ = static_cast<T*>(data);
            capacity_ = capacity;
        }
        return data_ + size_;
    }
    void took(std::size_t count) { size_ += count; }
    // Gives back what is not used.
    void fit() {
        void* data = size_ > 0 ? std::realloc(data_, size_ * sizeof(T)) : nullptr;
        if (data == nullptr) return;
        data_ = static_cast<T*>(data);
        capacity_ = size_;
    }
    void clear() { size_ = 0; }
    void release() {
        std::free(data_);
        data_ = nullptr;
        size_ = capacity_ = 0;
    }
    std::size_t size() const { return size_; }
    const T* data() const { return data_; }
    const T& operator[](std::size_t i) const { return data_[i]; }

private:
    T* data_ = nullptr;
    std::size_t size_ = 0, capacity_ = 0;
};

}  // namespace ibpo
