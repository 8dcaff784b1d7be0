# make                  builds ./train_gpt: for GPUs where nvcc and a GPU are, else for CPUs
# make CUDA=1           builds it for GPUs, also where there is only nvcc; ARCH="80 90" chooses
#                       for which compute capabilities. CUDA=0: for CPUs, whatever is here
# make install          copies train_gpt, acco-launch, acco-keep-going, a man page and completion
#                       for bash to PREFIX=/usr/local; make uninstall removes them
# make dist             a tarball of the last commit in build/, which builds without git
# make run              installs what is missing, builds, and trains a small model for a minute
# make test             installs what is missing and runs all tests; GROUP=unit, rules, program or
#                       cuda: those of one folder of test/
# make test-asan, test-tsan     the tests under sanitizers
# make test-slurm       jobs that go on under a real Slurm, on this machine; needs root
# make test-distro      on Debian 13, in a chroot: a run, two folders of tests, a job of every rule; needs root
# make test-llama-cpp   exported models in llama.cpp, which it installs; needs a C library as new as Debian 13's
# make check            are layout, includes, names of rules and documentation in order?
# make check-cxx        are the sources also valid C++?
# make format           lays out every C and CUDA file as .clang-format says
# make fuzz             looks for inputs that break a parser, FUZZ_SECONDS=20 each, or
#                       FUZZ_INPUTS=N of them; needs clang
# make bench            measures this machine
# make test-ptx         the tests of CUDA kernels on a machine that executes nvcc's code (PTX), for
#                       three architectures; make test does it for one. Needs nvcc, no GPU
# make test-gpu, bench-gpu      test and bench for a GPU; see dev/gpu/README.md
# make gpu-reference    losses of the CPU, to be compared with a GPU's; five minutes
# make compare          all update rules at several link speeds, about ten minutes
# make reproduce        the claims of three papers, made again: some hours, can be stopped and
#                       goes on. make reproduce-A4, or reproduce- and a paper: a part of them.
#                       SCALE=box|gpu|paper HOSTS=FILE DATA=DIR OUT=DIR RESULTS=DIR DRY_RUN=yes
# make info             what was found on this machine, where, what is missing, and why
# make tokenizer        the Python environment that prepares data (build/venv)
# make options          writes the tables of options into docs/options.md
# make clean            removes what was built
# make help             prints this
#
# Compilers: CC, CXX, MPICC, NVCC. Libraries: CUDA_HOME, NCCL_HOME, MPI_HOME, or CPPFLAGS and
# LDFLAGS. Processor: ARCH_FLAGS, by default -march=native; -march=x86-64-v3 runs on all with
# AVX2. WERROR=-Werror: warnings are errors, for who changes the sources. On the command line or in
# the environment; a change of them rebuilds.

BUILD   := build
CONFIG  := build/config.mk
PROGRAM := train_gpt
GROUP   := unit rules program cuda
TESTS   := $(sort $(basename $(notdir $(wildcard $(GROUP:%=test/%/test_*.c)))))
CUDA_TESTS := $(sort $(basename $(notdir $(wildcard $(GROUP:%=test/%/test_*.cu)))))
BENCHES := $(sort $(basename $(notdir $(wildcard dev/bench/bench_*.c))))
CORES   := $(shell nproc)
PLAN_PAGE := build/plan-page.inc

.DEFAULT_GOAL := all
.SUFFIXES:
.DELETE_ON_ERROR:

# What the user asks for. The result of the probe has other names, so that it is not taken
# for a wish the next time.
WISHES := CC=$(CC) CXX=$(CXX) MPICC=$(MPICC) NVCC=$(NVCC) CPPFLAGS=$(CPPFLAGS) LDFLAGS=$(LDFLAGS) ARCH_FLAGS=$(ARCH_FLAGS) \
          CUDA=$(CUDA) CUDA_HOME=$(CUDA_HOME) NCCL_HOME=$(NCCL_HOME) MPI_HOME=$(MPI_HOME)
PROBE  := CC='$(CC)' CXX='$(CXX)' MPICC='$(MPICC)' NVCC='$(NVCC)' CPPFLAGS='$(CPPFLAGS)' LDFLAGS='$(LDFLAGS)' ARCH_FLAGS='$(ARCH_FLAGS)' \
          CUDA='$(CUDA)' CUDA_HOME='$(CUDA_HOME)' NCCL_HOME='$(NCCL_HOME)' MPI_HOME='$(MPI_HOME)' scripts/probe

ifeq ($(filter clean help uninstall dist,$(MAKECMDGOALS)),)
include $(CONFIG)
endif
ifneq ($(HAVE_MPI),yes)
BENCHES := $(filter-out bench_transport,$(BENCHES))
endif

# -O3 -march=native      this machine's vector units
# -fno-math-errno        sqrt and friends need not set errno, so that loops over them vectorise
# -fno-trapping-math     comparisons may be evaluated ahead; NaN and infinity keep their meaning (no finite-math flag anywhere)
# -fopenmp-simd          honours `omp simd`; no OpenMP threads
# -ffp-contract=off      multiply and add fuse only where the source says so (kernels/cpu/vector_math.h)
# -fno-builtin-fmax, -fmin  gcc 12.2 for aarch64 ends in an internal error where it vectorises a largest double of smaller numbers
# -x c: the sources are CUDA C++ to nvcc and C11 to everybody else.
SANITIZE   :=
ARITHMETIC := $(ARCH_FLAGS) -fno-math-errno -fno-trapping-math -fopenmp-simd -ffp-contract=off -fno-builtin-fmax -fno-builtin-fmin
OPTIMIZE   := -O3
WARNINGS   := -Wall -Wextra $(WERROR)
# C's habits that C++20 warns of: an enum as a named number, and members that an initializer leaves at zero.
CXX_WARNINGS := $(WARNINGS) -Wno-deprecated-enum-float-conversion -Wno-deprecated-enum-enum-conversion -Wno-deprecated-anon-enum-enum-conversion \
                -Wno-missing-field-initializers -Wno-missing-braces -Wno-constant-logical-operand
CFLAGS     := -std=gnu11 $(OPTIMIZE) $(ARITHMETIC) -g $(WARNINGS) -I. $(MPI_FLAGS) $(ONEDNN_FLAGS) $(SANITIZE)
LIBS       := $(MPI_LIBS) -ljansson -lz -lpcre2-8 -lutf8proc $(ONEDNN_LIBS) -lm -lpthread
COMPILE    = $(CC) $(CFLAGS) $(CPPFLAGS) -MMD -MP
# Ends the build with the lines of the probe that say what is missing. The next make probes
# again, for by then it may be there.
NEEDED     = if grep -E '^compiler +missing' $(CONFIG).txt || grep -E '^(jansson|zlib|PCRE2|utf8proc) +missing' $(CONFIG).txt; then \
             rm -f $(CONFIG); echo "make run installs what it can; make info says more"; exit 1; fi

# --version tells from which commit and for which processor the program was built.
REVISION   = $(or $(strip $(file < REVISION)),$(shell git describe --always --dirty --exclude '*' 2> /dev/null))
FACTS      = -DACCO_REVISION='"$(REVISION)"' -DACCO_PROCESSOR='"$(PROCESSOR)"'

# The CUDA program: the same sources, compiled by nvcc. The PTX of the oldest architecture
# is included, which the driver of every other GPU from there on can translate. nvcc only
# compiles, and the C++ compiler links, which understands every linker flag of the user.
ARCH       := $(GPU_ARCHITECTURES)
CUDA_FLAGS := -std=c++20 -O3 --threads 0 -ccbin $(lastword $(CXX)) \
              $(foreach arch,$(ARCH),-gencode arch=compute_$(arch),code=sm_$(arch)) \
              -gencode arch=compute_$(firstword $(ARCH)),code=compute_$(firstword $(ARCH)) -I. -DACCO_HAVE_CUDA \
              $(if $(filter yes,$(HAVE_NCCL)),-DACCO_HAVE_NCCL) $(MPI_FLAGS) $(ONEDNN_FLAGS) -Xcompiler "$(OPTIMIZE) $(ARITHMETIC) -g $(CXX_WARNINGS)" \
              $(CPPFLAGS) $(CUDA_FLAGS_FOUND)
CUDA_LINK    := $(LDFLAGS) $(if $(filter yes,$(HAVE_NCCL)),-lnccl) $(CUDA_LIBS) $(LIBS)

# The same sources compiled by the host's C++ compiler against an emulator of GPUs
# (test/simt): how `make test` runs CUDA kernels.
EMULATE    = $(CXX) -std=gnu++20 $(EMULATE_OPTIMIZE) $(ARITHMETIC) -g $(CXX_WARNINGS) -Itest/simt -I. -DACCO_HAVE_CUDA $(MPI_FLAGS) $(ONEDNN_FLAGS) \
             $(if $(filter yes,$(HAVE_MPI)),-DACCO_HAVE_NCCL) $(SANITIZE) $(CPPFLAGS) -MMD -MP -x c++
EMULATE_OPTIMIZE := -O2
# Of tests: lines for a backtrace, and a debugger's symbols only where a sanitizer is; they take a
# fifth of the compiler's time.
LINES_ONLY := $(if $(SANITIZE),,-g1)

# Open MPI refuses root unless it is told twice.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

.PHONY: all help info install uninstall dist run test test-asan test-tsan run-tests check check-cxx format options bench benches run-bench compare run-compare tokenizer clean \
        install-for-run install-for-test install-for-check

all: $(PROGRAM)

# $(BUILD)/NAME.flags holds what a part of the build was made with, and is out of date where
# that has changed; what was made with it depends on it.
FLAGS.wishes  := $(WISHES)
FLAGS.c       := $(COMPILE) | $(LDFLAGS) $(LIBS)
FLAGS.emulate := $(EMULATE) | $(LDFLAGS) $(LIBS)
FLAGS.cuda    := $(NVCC_FOUND) $(CUDA_FLAGS) | $(CXX) $(CUDA_LINK)
# Sanitizers do not work with nvcc, so builds with a sanitizer are always for CPUs.
BUILD_FOR     := $(if $(SANITIZE),CPUs,$(if $(filter yes1 yesyes,$(HAVE_CUDA)$(DEMAND_CUDA) $(HAVE_CUDA)$(HAVE_GPU)),GPUs,CPUs))
FLAGS.program := $(BUILD_FOR)
define watch
ifneq ($$(strip $$(file < $(1))),$$(strip $$(FLAGS.$(2))))
.PHONY: $(1)
endif
$(1):
	@mkdir -p $$(@D)
	@printf '%s\n' '$$(subst ','\'',$$(FLAGS.$(2)))' > $$@
endef
$(eval $(call watch,build/wishes.flags,wishes))
$(foreach part,c emulate cuda program,$(eval $(call watch,$(BUILD)/$(part).flags,$(part))))

# The result of the probe. `make info` probes again, and so does every target that
# installs something.
$(CONFIG): scripts/probe kernels/cpu/onednn.h build/wishes.flags
	@$(PROBE) $@
	@touch $@

info: build/wishes.flags
	@$(PROBE) $(CONFIG)
	@cat $(CONFIG).txt

help:
	@sed -n '/^#/!q; s/^#$$//; s/^# //; p' Makefile

ifeq ($(BUILD_FOR),GPUs)
$(PROGRAM): train_gpt_cuda $(BUILD)/program.flags
	@cp -f $< $@
else ifeq ($(DEMAND_CUDA)$(SANITIZE),1)
.PHONY: $(PROGRAM)
$(PROGRAM):
	@echo "CUDA=1 asks for a program for GPUs:"; grep '^CUDA' $(CONFIG).txt; rm -f $(CONFIG); exit 1
else
$(PROGRAM): $(BUILD)/train_gpt.o $(BUILD)/program.flags
	@$(CC) $(CFLAGS) $(LDFLAGS) $< -o $@ $(LIBS)
	@echo "built $@ (CPU; MPI: $(HAVE_MPI); oneDNN: $(HAVE_ONEDNN)). make info says more; try: make run"
endif

train_gpt_cuda: $(BUILD)/train_gpt_cuda.o
	@$(CXX) $< -o $@ $(CUDA_LINK)
	@echo "built $@ (GPUs of compute capability $(ARCH), and CPUs; MPI: $(HAVE_MPI); NCCL: $(HAVE_NCCL)). make info says more"

$(BUILD)/train_gpt_cuda.o: train_gpt.cu $(PLAN_PAGE) Makefile $(BUILD)/cuda.flags
	@mkdir -p $(@D)
	@if [ "$(HAVE_CUDA)" != yes ]; then grep '^CUDA' $(CONFIG).txt; rm -f $(CONFIG); exit 1; fi
	@$(NEEDED)
	$(NVCC_FOUND) $(CUDA_FLAGS) $(FACTS) -MMD -MP -c $< -o $@

$(BUILD)/emulated/train_gpt: train_gpt.cu $(PLAN_PAGE) Makefile $(BUILD)/emulate.flags
	@mkdir -p $(@D)
	$(EMULATE) $(LINES_ONLY) $(FACTS) $< -o $@ $(LDFLAGS) $(LIBS)

$(BUILD)/emulated/bench_cuda: dev/gpu/bench_cuda.cu Makefile $(BUILD)/emulate.flags
	@mkdir -p $(@D)
	$(EMULATE) $< -o $@ $(LDFLAGS) $(LIBS)

$(BUILD)/test/%: test/cuda/%.cu Makefile $(BUILD)/emulate.flags
	@mkdir -p $(@D)
	$(EMULATE) $(LINES_ONLY) $< -o $@ $(LDFLAGS) -lcmocka $(LIBS)

# Its loads and stores call functions of its own (test/cuda/accesses.h), so ThreadSanitizer's
# library is not linked.
$(BUILD)/test/test_cuda_counters: test/cuda/test_cuda_counters.cu test/cuda/accesses.c Makefile $(BUILD)/emulate.flags $(BUILD)/c.flags
	@mkdir -p $(@D)
	@$(COMPILE) -MT $@ -c test/cuda/accesses.c -o $@.accesses.o
	$(EMULATE) $(LINES_ONLY) -MT $@ -fsanitize=thread -c $< -o $@.o
	@$(CXX) $@.o $@.accesses.o -o $@ $(LDFLAGS) -lcmocka $(LIBS)
	@rm $@.o $@.accesses.o

# The same tests compiled by nvcc, and the program's PTX: a machine of our own executes it
# (test/ptx). Device code of these objects is not used, so it is not optimised. What adds and
# multiplies must do so in two steps.
PTX_DIR   := build/ptx
PTX_TESTS := $(addprefix $(PTX_DIR)/test_,cuda_layers cuda_attention cuda_updates cuda_muon cuda_model ptx)
PTX_ARCHS := $(filter 80 90 120,$(ARCH))
PTX_ARCH  := $(firstword $(filter 90,$(ARCH)) $(ARCH))
PTX_FLAGS  = -std=c++20 -I. -DACCO_HAVE_CUDA -ccbin $(lastword $(CXX)) $(MPI_FLAGS) $(ONEDNN_FLAGS) $(CPPFLAGS) $(CUDA_FLAGS_FOUND) -MMD -MP

$(PTX_DIR)/machine.o: test/ptx/machine.cu Makefile $(BUILD)/cuda.flags
	@mkdir -p $(@D)
	$(CXX) -std=gnu++20 -O3 $(ARITHMETIC) $(CXX_WARNINGS) -I. $(CUDA_FLAGS_FOUND) -MMD -MP -x c++ -c $< -o $@

$(PTX_DIR)/program.%.ptx: train_gpt.cu $(PLAN_PAGE) Makefile $(BUILD)/cuda.flags
	@mkdir -p $(@D)
	$(NVCC_FOUND) $(PTX_FLAGS) -O3 -lineinfo -ptx -arch=compute_$* -MT $@ -MF $@.d $< -o $@

vpath test_%.cu test/cuda test/ptx
$(PTX_DIR)/test_%: test_%.cu $(PTX_DIR)/machine.o Makefile $(BUILD)/cuda.flags
	@mkdir -p $(@D)
	$(NVCC_FOUND) -Itest/ptx $(PTX_FLAGS) -DACCO_PTX -gencode arch=compute_$(PTX_ARCH),code=compute_$(PTX_ARCH) -Xcicc -O0 \
	    -Xcompiler "-O1 $(ARITHMETIC) $(CXX_WARNINGS)" -MT $@ -MF $@.d -c $< -o $@.o
	@$(CXX) $@.o $(PTX_DIR)/machine.o -o $@ $(LDFLAGS) -lcmocka $(LIBS)
	@rm $@.o

# The page of train_gpt plan --page, as the string of a C program.
$(PLAN_PAGE): plan/page.html scripts/page.css scripts/rule-colours Makefile
	@mkdir -p $(@D)
	@sed -e '/^{{style}}$$/{r scripts/page.css' -e 'd;}' -e '/^{{colours}}$$/{r scripts/rule-colours' -e 'd;}' $< | sed 's/[\\"]/\\&/g; s/.*/"&\\n"/' > $@

$(BUILD)/train_gpt.o: train_gpt.cu $(PLAN_PAGE) Makefile $(BUILD)/c.flags
	@mkdir -p $(@D)
	@$(NEEDED)
	$(COMPILE) $(FACTS) -x c -c $< -o $@

# What starts the program, parses or simulates takes longer to optimise than to run.
SIMPLE_TESTS := $(basename $(notdir $(wildcard test/program/*.c))) $(addprefix test_,cuts dataloader families fuzz hf_model launch_checks log options oracle \
                papers rules safetensors sample saving simulation spike split tokenizer trace trained)
$(SIMPLE_TESTS:%=$(BUILD)/test/%): SIMPLY := $(if $(SANITIZE),,-O0)

vpath test_%.c test/unit test/rules test/program
vpath ours.c test/llama_cpp
$(BUILD)/test/%: %.c Makefile $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(COMPILE) $(LINES_ONLY) $(SIMPLY) $< -o $@ $(LDFLAGS) -lcmocka $(LIBS)

$(BUILD)/bench/%: dev/bench/%.c Makefile $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(COMPILE) $< -o $@ $(LDFLAGS) $(LIBS)

# The path may have blanks.
PREFIX := /usr/local
install: $(PROGRAM)
	@scripts/install $(PROGRAM) "$(DESTDIR)$(PREFIX)"

uninstall:
	@scripts/install --remove "$(DESTDIR)$(PREFIX)"

# Without git, the file REVISION says from which commit the tarball is.
VERSION = $(shell sed -n 's/^\#define ACCO_VERSION "\(.*\)"/\1/p' options/options.h)
dist:
	@mkdir -p $(BUILD)
	@git archive --format=tar.gz --prefix=acco.c-$(VERSION)/ --add-virtual-file=acco.c-$(VERSION)/REVISION:$(patsubst %-dirty,%,$(REVISION)) \
	    -o $(BUILD)/acco.c-$(VERSION).tar.gz HEAD
	@echo "$(BUILD)/acco.c-$(VERSION).tar.gz, of $(patsubst %-dirty,%,$(REVISION))"

-include $(wildcard $(BUILD)/*.d $(BUILD)/emulated/*.d $(BUILD)/test/*.d $(BUILD)/bench/*.d $(BUILD)/fuzz/*.d $(PTX_DIR)/*.d)

# --- run ---

install-for-run: | $(CONFIG)
	@scripts/install-dependencies $(CONFIG) CC JSON ZLIB PCRE2 UTF8PROC -- ONEDNN MPI
	@$(PROBE) $(CONFIG)

run: install-for-run
	@$(MAKE) --no-print-directory train_gpt
	@scripts/first-run

# --- tests ---

install-for-test: | $(CONFIG)
	@scripts/install-dependencies $(CONFIG) CC CXX JSON ZLIB PCRE2 UTF8PROC CMOCKA -- ONEDNN MPI GNUPLOT
	@$(PROBE) $(CONFIG)

test: install-for-test
	@$(MAKE) --no-print-directory -j $(CORES) run-tests

# Each sanitizer has a build directory of its own. AddressSanitizer runs everything that
# make test runs except whole training runs on emulated GPUs (EMULATED= leaves them out);
# test_cuda_* still run every kernel under it, but for test_cuda_counters, which takes the
# place of a sanitizer.
test-asan: install-for-test
	@$(MAKE) --no-print-directory -j $(CORES) run-tests BUILD=build/asan PROGRAM=build/asan/train_gpt EMULATED= \
	    CUDA_TESTS="$(filter-out test_cuda_counters,$(CUDA_TESTS))" \
	    OPTIMIZE="-O1 -fno-omit-frame-pointer" EMULATE_OPTIMIZE=-O1 SANITIZE="-fsanitize=address,undefined -fno-sanitize-recover=all"
# The emulator runs the threads of a kernel as fibers (ucontext), which ThreadSanitizer
# cannot follow: test_cuda_* are left out.
test-tsan: install-for-test
	@$(MAKE) --no-print-directory -j $(CORES) run-tests BUILD=build/tsan PROGRAM=build/tsan/train_gpt CUDA_TESTS= EMULATED= \
	    OPTIMIZE="-O1 -fno-omit-frame-pointer" SANITIZE="-fsanitize=thread"

# Installs Slurm where it is missing.
.PHONY: test-slurm
test-slurm: install-for-run
	@$(MAKE) --no-print-directory train_gpt
	@test/slurm ./train_gpt

# Loads exported models in llama.cpp, which it installs: needs Python with venv, and a C library as new as
# Debian 13's (before: dev/distro trixie 'apt-get install -y python3-venv' 'make test-llama-cpp').
LLAMA_CPP := build/venv-llama-cpp
.PHONY: test-llama-cpp
test-llama-cpp: install-for-test
	@$(MAKE) --no-print-directory train_gpt $(BUILD)/test/ours
	@$(LLAMA_CPP)/bin/python -c 'import llama_cpp_py_sync' 2> /dev/null || { python3 -m venv $(LLAMA_CPP) && $(LLAMA_CPP)/bin/pip install -q llama-cpp-py-sync==0.11739; }
	@TRAIN_GPT=./train_gpt OURS=$(BUILD)/test/ours $(LLAMA_CPP)/bin/python test/llama_cpp/check.py

# Debian 13 has a newer compiler than Debian 12, oneDNN 3 and Open MPI 5. At the end, jobs of
# every rule, and two ranks of MPICH.
.PHONY: test-distro
test-distro:
	@dev/distro trixie 'make run' './train_gpt --version | grep -E "products +(our own tiles in bf16, else )?oneDNN 3"' 'make test GROUP="unit rules" EMULATED=' \
	    'make build/test/test_program && OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader build/test/test_program "*it learns*"' \
	    'make build/test/test_said && OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader build/test/test_said' \
	    'apt-get install -y --no-install-recommends libmpich-dev mpich && make train_gpt MPICC=mpicc.mpich && scripts/first-run --tokens 60k > mpich.txt && \
	        cat mpich.txt && grep "ranks  *2 over MPI" mpich.txt'

EMULATED = $(BUILD)/emulated/train_gpt

# Where nvcc is, and kernels are tested by themselves and without a sanitizer.
PTX_RUN := $(if $(and $(filter yes,$(HAVE_CUDA)),$(CUDA_TESTS),$(if $(SANITIZE),,yes)),test/ptx/run $(PTX_DIR) $(PTX_ARCH))

run-tests: $(PROGRAM) $(EMULATED) $(TESTS:%=$(BUILD)/test/%) $(CUDA_TESTS:%=$(BUILD)/test/%) \
           $(if $(PTX_RUN),$(PTX_TESTS) $(PTX_DIR)/program.$(PTX_ARCH).ptx)
	@MPIRUN="$(MPIRUN)" HAVE_MPI=$(HAVE_MPI) EMULATED=$(EMULATED) PTX_RUN="$(PTX_RUN)" test/run $(BUILD) $(PROGRAM) $(TESTS) $(CUDA_TESTS)

.PHONY: test-ptx run-ptx
test-ptx: install-for-test
	@$(MAKE) --no-print-directory -j $(CORES) run-ptx

run-ptx: $(PTX_TESTS) $(PTX_ARCHS:%=$(PTX_DIR)/program.%.ptx)
	@test/ptx/run $(PTX_DIR) $(PTX_ARCHS)

# libFuzzer comes with clang. Fuzz targets only read files, so they are built without MPI
# and oneDNN.
FUZZ_SECONDS := 20
FUZZ_INPUTS  :=
FUZZ_CC      := clang
FUZZERS      := $(patsubst test/fuzz/fuzz_%.h,%,$(wildcard test/fuzz/fuzz_*.h))
FUZZ_FLAGS   := -std=gnu11 -O1 -g -fno-omit-frame-pointer -fno-math-errno $(WARNINGS) -Wno-pass-failed -I. \
                -fsanitize=fuzzer,address,undefined,float-cast-overflow -fno-sanitize-recover=all \
                -fsanitize-coverage-ignorelist=test/fuzz/not-traced

.PHONY: fuzz
fuzz: $(CONFIG) $(BUILD)/fuzz/compiler
	@$(NEEDED)
	@$(MAKE) --no-print-directory -j $(CORES) $(FUZZERS:%=$(BUILD)/fuzz/%)
	@FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_INPUTS=$(FUZZ_INPUTS) test/fuzz/run $(BUILD)/fuzz $(FUZZERS)

$(BUILD)/fuzz/compiler:
	@mkdir -p $(@D)
	@echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | $(FUZZ_CC) -fsanitize=fuzzer,address -x c -o $@ - 2> /dev/null || \
	    { echo "make fuzz needs clang with libFuzzer, and $(FUZZ_CC) is none: Debian has it in clang and libclang-rt-14-dev (14: the" \
	    "version of clang); FUZZ_CC=NAME names another"; exit 1; }

$(BUILD)/fuzz/%: test/fuzz/fuzz_%.h test/fuzz/entry.c test/fuzz/not-traced Makefile $(CONFIG)
	$(FUZZ_CC) $(FUZZ_FLAGS) -MMD -MP -include $< -DTARGET=fuzz_$* test/fuzz/entry.c -o $@ -ljansson -lz -lpcre2-8 -lutf8proc -lm -lpthread

# Every header must compile by itself and be valid C++ as well as C, because nvcc compiles
# it as C++.
check-cxx: $(CONFIG) $(PLAN_PAGE)
	@for header in $(filter-out test/%,$(wildcard *.h */*.h)); do \
	    $(CXX) -std=c++20 $(ARCH_FLAGS) $(CXX_WARNINGS) $(MPI_FLAGS) $(ONEDNN_FLAGS) -I. -fopenmp-simd -fsyntax-only -include $$header -x c++ /dev/null || exit 1; done
	@$(CXX) -std=c++20 $(ARCH_FLAGS) $(CXX_WARNINGS) $(MPI_FLAGS) $(ONEDNN_FLAGS) -I. -fopenmp-simd -fsyntax-only -x c++ train_gpt.cu

# --- checks and layout ---

install-for-check: | $(CONFIG)
	@scripts/install-dependencies $(CONFIG) -- CLANG_FORMAT
	@$(PROBE) $(CONFIG)

# All of them are run, also where one has found something.
check: $(PROGRAM) install-for-check
	@failed=0; for script in arrows rules format docs; do dev/check-$$script || failed=1; done; exit $$failed

format:
	@dev/check-format --fix

options: $(PROGRAM)
	@scripts/update-options ./$(PROGRAM)

# --- the rest ---

bench: install-for-run
	@$(MAKE) --no-print-directory run-bench

# Builds the benchmarks and runs none: a change of the sources must not leave them behind.
benches: $(BENCHES:%=$(BUILD)/bench/%)

run-bench: $(PROGRAM) benches
	@MPIRUN="$(MPIRUN)" dev/bench/run $(BUILD)

compare: install-for-run
	@scripts/install-dependencies $(CONFIG) GNUPLOT --
	@$(MAKE) --no-print-directory run-compare

run-compare: $(PROGRAM)
	@PROGRAM=./$(PROGRAM) dev/compare/run

# dev/gpu/build compiles with nvcc into build/gpu, which can also be copied to a machine
# without nvcc. Its host code has these flags.
.PHONY: test-gpu bench-gpu gpu-reference host-flags
host-flags:
	@echo '$(OPTIMIZE) $(ARITHMETIC) $(CXX_WARNINGS)'

gpu-reference: $(PROGRAM)
	@dev/gpu/reference

test-gpu bench-gpu: install-for-test
	@if [ "$(HAVE_GPU)" != yes ]; then echo "no GPU here; for a machine that has one: dev/gpu/README.md"; exit 1; fi
	@if [ "$(HAVE_CUDA)" = yes ]; then dev/gpu/build; fi
	@dev/gpu/$(@:-gpu=)

# dev/reproduce/run says what the variables mean.
.PHONY: reproduce run-reproduce
reproduce: reproduce-all

reproduce-%: install-for-run
	@scripts/install-dependencies $(CONFIG) GNUPLOT --
	@$(MAKE) --no-print-directory run-reproduce CLAIMS="$(filter-out all,$*)"

run-reproduce: $(PROGRAM)
	@PROGRAM=./$(PROGRAM) MPIRUN="$(MPIRUN)" dev/reproduce/run $(CLAIMS) $(if $(SCALE),--scale "$(SCALE)") $(if $(DATA),--data "$(DATA)") \
	    $(if $(HOSTS),--hosts "$(HOSTS)") $(if $(OUT),--out "$(OUT)") $(if $(RESULTS),--results "$(RESULTS)") $(if $(DRY_RUN),--dry-run)

# The Python code that prepares data runs in its own virtual environment. The .pth file lets
# it find the code from any directory, and is written anew in case the project has moved.
tokenizer: build/venv/done
	@for packages in build/venv/lib/python3*/site-packages; do pwd > $$packages/acco.pth; done

build/venv/done: tokenizer/requirements.txt
	@python3 -m venv build/venv
	@build/venv/bin/pip install --quiet --disable-pip-version-check -r $< || { [ -e $@ ] || rm -rf build/venv; exit 1; } # half of it would be taken for all
	@touch $@

clean:
	rm -rf build train_gpt train_gpt_cuda
