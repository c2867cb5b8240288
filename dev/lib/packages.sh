# Sourced: what must be on the machine, for the servers and for building. On Debian and Ubuntu missing packages are
# installed when root or sudo allows it; otherwise the exact command is printed and the script ends.

apt_lock_wait_s=300 # an unattended upgrade may hold dpkg for minutes on a fresh machine

has_apt() { command -v apt-get >/dev/null && [[ -f /etc/debian_version ]]; }
has_program() { command -v "$1" >/dev/null; }
has_library() { has_program pkg-config && pkg-config --exists "$1"; }

may_install() {
  has_apt || return 1
  [[ $EUID == 0 ]] && return
  has_program sudo && { sudo -n true 2>/dev/null || [[ -t 0 ]]; } # a person at a terminal can be asked for the password
}

as_root() { if [[ $EUID == 0 ]]; then "$@"; else sudo "$@"; fi; }

missing_server_packages() {
  postgres_bin >/dev/null || say postgresql
  has_program redis-server || say redis-server
  has_program java || say default-jre-headless
  has_program mvn || cmp -s "$root/dev/kafka/pom.xml" "$state/kafka/lib/pom.xml" || say maven
}

# What `cargo build` needs besides Rust: rdkafka-sys runs librdkafka's configure and make, and links OpenSSL and zlib.
missing_build_packages() {
  has_program gcc || say gcc
  has_program g++ || say g++ # librdkafka's make builds its C++ wrapper too
  has_program make || say make
  [[ -e /usr/include/stdio.h ]] || say libc6-dev
  has_program pkg-config || say pkg-config
  has_library openssl || say libssl-dev
  has_library zlib || say zlib1g-dev
}

install_missing() { # servers | build
  local missing
  case $1 in
    servers) missing=$(missing_server_packages) ;;
    build) missing=$(missing_build_packages) ;;
  esac
  [[ $missing ]] || return 0
  missing=$(tr '\n' ' ' <<<"$missing")
  missing=${missing% }
  if ! may_install; then
    complain "missing for the $1: $missing"
    if has_apt; then
      die "install them, then try again:  sudo apt-get update && sudo apt-get install --no-install-recommends $missing"
    fi
    die "install what your system calls these Debian packages, then try again; or start Docker and use STACK=containers for the servers"
  fi
  say "installing $missing"
  # shellcheck disable=SC2086 # a list of words
  apt_install $missing
}

# Debian starts a server as soon as it is installed, and makes a cluster on 5432. Ours have ports and data of their
# own, so for the time of the installation both are switched off; an existing setting of the machine is left alone.
apt_install() {
  local log=$state/logs/apt.log policy=/usr/sbin/policy-rc.d cluster=/etc/postgresql-common/createcluster.d/recant-dev.conf made=''
  mkdir -p "$state/logs"
  if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
    as_root chmod +x "$policy"
    made=$policy
  fi
  if [[ ! -d /etc/postgresql-common ]]; then
    as_root mkdir -p "$(dirname "$cluster")"
    say 'create_main_cluster = false' | as_root tee "$cluster" >/dev/null
    made="$made $cluster"
  fi
  local apt=(as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o "DPkg::Lock::Timeout=$apt_lock_wait_s") failed=''
  { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "$@"; } </dev/null >"$log" 2>&1 || failed=yes
  # shellcheck disable=SC2086 # a list of words
  [[ ! $made ]] || as_root rm -f $made
  [[ ! $failed ]] && return
  grep -E '^(E|Err|W):' "$log" | tail -3 | sed 's/^/  | /' >&2
  die "apt-get could not install $*; see $log"
}

require_rust() {
  has_program cargo && return
  if [[ -x $HOME/.cargo/bin/cargo ]]; then
    export PATH=$HOME/.cargo/bin:$PATH
    return
  fi
  die "Rust is missing: 'cargo' is not on PATH; install it with rustup (https://rustup.rs), rust-toolchain.toml names the version"
}
