//! Random sequences of steps on a real Redis and on the pure rules, compared after every step: replies, value, entry, ttl.

use proptest::prelude::*;
use recant_schema::scripts::Tombstones;
use recant_schema::tombstone::{Floor, Memory, Slot};
use recant_schema::version::Version;

use crate::cache::{Cache, PrivateServer, or_out_of_memory};

/// Steps meet on few keys, so that they meet often.
const KEYS: usize = 2;

/// Longest sequence, and how many are tried: a few seconds on two cores, with some hundred thousand commands.
const MAX_STEPS: usize = 60;
const SEQUENCES: u32 = 128;

/// Numbers at which comparisons go wrong: where text order and numeric order differ, where doubles lose bits, where signs flip, the end.
pub(crate) const NUMBERS: [u64; 13] =
    [0, 1, 9, 10, 99, 100, (1 << 53) - 1, 1 << 53, (1 << 53) + 1, i64::MAX as u64, 1 << 63, u64::MAX - 1, u64::MAX];

/// One step on one key.
#[derive(Clone, Debug)]
enum Step {
    Read { ttl_ms: u64, refresh: bool },
    Fill { mark: Bring, version: Option<Floor> },
    Invalidate { said: Floor, ttl_ms: u64, tombstones: Tombstones },
    Owe { said: Floor, ttl_ms: u64 },
    Forget,
    EraseMark,
    LoseValue,
    LoseEntry,
    Memory { full: bool },
}

/// Which mark a fill brings.
#[derive(Clone, Debug)]
enum Bring {
    /// The one that is there, if one is.
    Held,
    /// That of an earlier read, perhaps of the other key.
    Given(usize),
    Nothing,
}

fn floors() -> impl Strategy<Value = Floor> {
    let number = prop::sample::select(NUMBERS.as_slice());
    // One source twice as often: within one source versions compare.
    let source = prop::sample::select(vec!["shop", "shop", "stock"]);
    // Mostly one epoch, so that positions decide as well.
    let epoch = prop_oneof![2 => Just(1_u64), 1 => number.clone()];
    (source, epoch, number).prop_map(|(source, epoch, position)| Floor { source: source.to_owned(), version: Version { epoch, position } })
}

fn steps(memory: bool) -> impl Strategy<Value = Vec<(usize, Step)>> {
    // Hours, in steps that no test takes long enough to blur.
    let ttl_ms = prop::sample::select(vec![3_600_000_u64, 7_200_000, 10_800_000]);
    let tombstones = prop_oneof![Just(Tombstones::Always), Just(Tombstones::WhenCached)];
    let mark = prop_oneof![6 => Just(Bring::Held), 2 => (0..MAX_STEPS).prop_map(Bring::Given), 1 => Just(Bring::Nothing)];
    let step = prop_oneof![
        6 => (ttl_ms.clone(), any::<bool>()).prop_map(|(ttl_ms, refresh)| Step::Read { ttl_ms, refresh }),
        6 => (mark, prop::option::of(floors())).prop_map(|(mark, version)| Step::Fill { mark, version }),
        6 => (floors(), ttl_ms.clone(), tombstones)
            .prop_map(|(said, ttl_ms, tombstones)| Step::Invalidate { said, ttl_ms, tombstones }),
        3 => (floors(), ttl_ms).prop_map(|(said, ttl_ms)| Step::Owe { said, ttl_ms }),
        1 => Just(Step::Forget),
        1 => Just(Step::EraseMark),
        1 => Just(Step::LoseValue),
        1 => Just(Step::LoseEntry),
        u32::from(memory) * 3 => any::<bool>().prop_map(|full| Step::Memory { full }),
    ];
    prop::collection::vec((0..KEYS, step), 1..=MAX_STEPS)
}

/// Runs the steps on both sides.
fn run(cache: &mut Cache, steps: &[(usize, Step)]) -> Result<(), TestCaseError> {
    let keys = [(); KEYS].map(|()| cache.key());
    let mut models: [Slot; KEYS] = Default::default();
    let mut given = Vec::new();
    let mut memory = Memory::Free;
    for (number, (at, step)) in steps.iter().enumerate() {
        let (key, model) = (&keys[*at], &mut models[*at]);
        match step {
            Step::Read { ttl_ms, refresh } => {
                let nonce = format!("nonce {number}");
                let reply = cache.read(key, &nonce, *ttl_ms, *refresh).expect("a read is never refused");
                prop_assert_eq!(&reply, &model.read(&nonce, *ttl_ms, *refresh, memory), "step {}", number);
                given.extend(reply.mark.map(|mark| mark.nonce));
            }
            Step::Fill { mark, version } => {
                let mark = match mark {
                    Bring::Held => model.entry.as_ref().and_then(|entry| entry.mark.clone()),
                    Bring::Given(index) => given.get(index % given.len().max(1)).cloned(),
                    Bring::Nothing => None,
                };
                let value = format!("value {number}").into_bytes();
                let reply = or_out_of_memory(cache.fill(key, mark.as_deref(), version.as_ref(), &value));
                prop_assert_eq!(reply, model.fill(mark.as_ref(), version.as_ref(), value, memory), "step {}", number);
            }
            Step::Invalidate { said, ttl_ms, tombstones } => {
                let reply = or_out_of_memory(cache.invalidate(key, said, *ttl_ms, *tombstones));
                prop_assert_eq!(reply, model.invalidate(said, *ttl_ms, *tombstones, memory), "step {}", number);
            }
            Step::Owe { said, ttl_ms } => {
                let reply = or_out_of_memory(cache.owe(key, said, *ttl_ms));
                prop_assert_eq!(reply, model.owe(said, *ttl_ms, memory), "step {}", number);
            }
            Step::Forget => {
                let reply = cache.forget(key).expect("a forget is never refused");
                prop_assert_eq!(reply, model.forget(), "step {}", number);
            }
            Step::EraseMark => {
                cache.command(&["HDEL", &key.entry(), "m"]).expect("Redis answers");
                model.erase_mark();
            }
            Step::LoseValue => {
                cache.command(&["UNLINK", key.as_str()]).expect("Redis answers");
                model.lose_value();
            }
            Step::LoseEntry => {
                cache.command(&["UNLINK", &key.entry()]).expect("Redis answers");
                model.lose_entry();
            }
            Step::Memory { full } => {
                cache.set_memory_full(*full);
                memory = if *full { Memory::Full } else { Memory::Free };
            }
        }
        if let Some(difference) = cache.differs_from(key, model) {
            return Err(TestCaseError::fail(format!("after step {number}, {step:?}: {difference}")));
        }
    }
    Ok(())
}

fn config() -> ProptestConfig {
    // What fails is printed, shrunk; no file is written beside the sources.
    ProptestConfig { cases: SEQUENCES, failure_persistence: None, ..ProptestConfig::default() }
}

#[test]
fn the_scripts_do_exactly_what_the_pure_rules_say() {
    let cache = std::cell::RefCell::new(Cache::connect());
    proptest!(config(), |(steps in steps(false))| run(&mut cache.borrow_mut(), &steps)?);
}

#[test]
fn the_scripts_do_exactly_what_the_pure_rules_say_while_memory_runs_out_and_comes_back() {
    let server = PrivateServer::start();
    let cache = std::cell::RefCell::new(server.connect());
    proptest!(config(), |(steps in steps(true))| {
        let mut cache = cache.borrow_mut();
        cache.set_memory_full(false);
        run(&mut cache, &steps)?;
    });
}
