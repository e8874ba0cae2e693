# build      one static binary, ./shunt
# demo       build, then the demonstration; needs Go and make only
# test       set up the machine, then all three tiers of tests
# test-kernels      the tests of the bypass on kernels of Debian's, under QEMU; KERNELS="-kernel 6.12" for some
# kernel-permanent  build the kernel with BPF_F_PERMANENT that test-kernels runs then, too
# bench      set up the machine, then measure beside haproxy and socat; BENCH=-short for a quick round
# generate   rebuild the committed BPF objects; needs clang
# lint       gofmt, go vet, staticcheck

STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2

.PHONY: build demo test test-kernels kernel-permanent bench generate lint clean setup

build:
	CGO_ENABLED=0 go build -trimpath -o shunt ./cmd/shunt

demo: build
	./shunt demo

setup:
	@test/setup.sh

test: setup
	@go run ./test/tiers

test-kernels:
	@test/kernels/setup.sh
	@go run ./test/kernels -table test/kernels/RESULTS.md $(KERNELS)

kernel-permanent:
	@test/kernels/setup.sh build
	@go run ./test/kernels -build-permanent

bench: setup
	@go run ./test/bench $(BENCH)

generate:
	go generate ./bpf

lint:
	@bad=$$(gofmt -l bpf cmd proxy splice test); if [ -n "$$bad" ]; then echo "not formatted: $$bad"; exit 1; fi
	go vet ./...
	go run $(STATICCHECK) ./...

clean:
	rm -rf shunt test/bin test/results
