# build      one static binary, ./shunt
# install    the binary, the systemd units, and an example configuration where there is none; DESTDIR, PREFIX
# uninstall  what install installed, without the configuration
# demo       build, then the demonstration; needs Go and make only
# test       set up the machine, then all tiers of tests; the last boots two other kernels
# test-kernels      the tests of the bypass on kernels of Debian's, under QEMU; KERNELS="-kernel 6.12" for some
# kernel-permanent  build the kernel with BPF_F_PERMANENT that test-kernels runs then, too
# bench      set up the machine, then measure beside haproxy and socat; BENCH=-short for a quick round
# generate   rebuild the committed BPF objects; needs clang
# lint       gofmt, go vet, staticcheck

STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2

DESTDIR =
PREFIX = /usr/local
UNITS = $(DESTDIR)$(PREFIX)/lib/systemd/system

.PHONY: build install uninstall demo test test-kernels kernel-permanent bench generate lint clean setup

build:
	CGO_ENABLED=0 go build -trimpath -o shunt ./cmd/shunt

# Not built again as root: "make && sudo make install".
install:
	@[ -x shunt ] || $(MAKE) build
	install -D -m 0755 shunt $(DESTDIR)$(PREFIX)/bin/shunt
	install -d $(UNITS)
	sed 's,/usr/local/bin/,$(PREFIX)/bin/,' cmd/shunt/deploy/shunt.service >$(UNITS)/shunt.service
	install -m 0644 cmd/shunt/deploy/shunt.socket $(UNITS)/shunt.socket
	chmod 0644 $(UNITS)/shunt.service
	[ -e $(DESTDIR)/etc/shunt/config.toml ] || install -D -m 0644 config.example.toml $(DESTDIR)/etc/shunt/config.toml

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/bin/shunt $(UNITS)/shunt.service $(UNITS)/shunt.socket

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
