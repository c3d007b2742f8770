// native random SEED COUNT | native long | native fuzz [libFuzzer's options and corpus]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

void check_random(std::uint64_t seed, long count);
void check_long();
int fuzz(int argc, char** argv);

int main(int argc, char** argv) {
    if (argc == 4 && std::strcmp(argv[1], "random") == 0) {
        check_random(std::strtoull(argv[2], nullptr, 10), std::strtol(argv[3], nullptr, 10));
        return 0;
    }
    if (argc == 2 && std::strcmp(argv[1], "long") == 0) {
        check_long();
        return 0;
    }
    if (argc >= 2 && std::strcmp(argv[1], "fuzz") == 0) return fuzz(argc - 1, argv + 1);
    std::fprintf(stderr, "usage: native random SEED COUNT | native long | native fuzz [OPTIONS OF LIBFUZZER]\n");
    return 2;
}
