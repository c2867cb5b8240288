//! The loop's decisions, tested without starting anything.

use super::*;
use recant_schema::invalidation::Invalidation;
use recant_schema::labels::{EpochCause, Lane};
use recant_schema::record::Record;
use recant_schema::version::Version;
use std::ops::Range;
use uuid::Uuid;

const P: Partition = Partition { topic: 0, number: 0 };
const Q: Partition = Partition { topic: 1, number: 0 };

fn state() -> State {
    State::new(KeyPrefixes::parse(&["v2:".to_owned()]).unwrap(), vec!["t".into(), "t.bulk".into()], true)
}

fn point(offset: i64) -> Point {
    Point { offset, time_ms: 1000 + offset }
}

fn marker(points: &[(Partition, i64)]) -> Marker {
    Marker { points: points.iter().map(|(partition, offset)| (*partition, point(*offset))).collect(), ..Marker::default() }
}

fn record_of(partition: Partition, offset: i64, epoch: u64, cause: EpochCause) -> Delivery {
    let key = format!("v2:k{offset}");
    let value = Record::Invalidation(Invalidation {
        id: Uuid::nil(),
        key: Key::parse(&key).unwrap(),
        version: Version::new(epoch, 1),
        tenant: None,
        class: None,
        regions: None,
        lane: Lane::Realtime,
        committed_at_us: 0,
        commit_basis: CommitBasis::Commit,
        source: Source { database: "shop".into(), relay: "r".into(), epoch_cause: Some(cause) },
        traceparent: None,
    });
    raw(partition, offset, &key, &value.encode())
}

fn record(partition: Partition, offset: i64) -> Delivery {
    record_of(partition, offset, 7, EpochCause::First)
}

fn raw(partition: Partition, offset: i64, key: &str, value: &[u8]) -> Delivery {
    Delivery {
        partition,
        point: point(offset),
        key: Some(key.into()),
        value: Some(value.into()),
        key_bytes: key.len(),
        value_bytes: value.len(),
        delivered_us: 0,
    }
}

fn work(effects: &[Effect]) -> Vec<WorkId> {
    effects
        .iter()
        .filter_map(|effect| if let Effect::Apply(work) = effect { Some(work) } else { None })
        .flatten()
        .map(|work| work.id)
        .collect()
}

fn find<T>(effects: &[Effect], pick: impl Fn(&Effect) -> Option<T>) -> Option<T> {
    effects.iter().find_map(pick)
}

type Ranges = Vec<(Partition, Range<i64>)>;

fn replay_of(effects: &[Effect]) -> Option<(u32, Ranges)> {
    find(effects, |effect| if let Effect::Replay { session, ranges } = effect { Some((*session, ranges.clone())) } else { None })
}

fn located_request(effects: &[Effect]) -> u32 {
    find(effects, |effect| if let Effect::Locate { request, .. } = effect { Some(*request) } else { None })
        .expect("a question for the broker")
}

fn settled(state: &State, partition: Partition) -> Option<i64> {
    state.settled().find(|(owned, _)| *owned == partition).and_then(|(_, point)| point).map(|point| point.offset)
}

/// Owns P, whose log holds 0..100 and whose marker is at 50; returns the replay's session.
fn running() -> (State, u32) {
    let mut state = state();
    assert!(matches!(state.apply(Action::Assigned(vec![P]))[..], [Effect::Recall]));
    let effects = state.apply(Action::Recalled { generation: 1, marker: marker(&[(P, 50)]) });
    let request = located_request(&effects);
    let effects = state.apply(Action::Located { request, logs: vec![(P, Log { low: 0, high: 100, since: Some(40) })] });
    assert!(matches!(&effects[..], [Effect::AssignLive(from), Effect::Replay { .. }] if *from == [(P, 100)]), "{effects:?}");
    let (session, ranges) = replay_of(&effects).unwrap();
    assert_eq!(ranges, [(P, 40..100)]);
    (state, session)
}

fn replay_all(state: &mut State, session: u32, offsets: Range<i64>) -> Vec<Effect> {
    let effects = state.apply(Action::Replayed { session, records: offsets.map(|offset| record(P, offset)).collect() });
    let ids = work(&effects);
    state.apply(Action::Answered(ids))
}

#[test]
fn fresh_records_do_not_wait_behind_a_replay() {
    let (mut state, _) = running();
    let effects = state.apply(Action::Delivered(vec![record(P, 100)]));
    assert_eq!(work(&effects).len(), 1);
}

#[test]
fn a_replay_holds_the_watermark_back_until_it_is_done() {
    let (mut state, session) = running();
    let fresh = work(&state.apply(Action::Delivered(vec![record(P, 100)])));
    state.apply(Action::Answered(fresh));
    assert_eq!(settled(&state, P), Some(50));
    replay_all(&mut state, session, 40..80);
    assert_eq!(settled(&state, P), Some(79));
    let effects = replay_all(&mut state, session, 80..100);
    assert_eq!(settled(&state, P), Some(100));
    assert_eq!(replay_of(&effects).unwrap().1, []);
    assert_eq!(state.replaying(), 0);
}

#[test]
fn a_replay_that_finds_the_end_of_the_log_is_done() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..90);
    assert_eq!(state.replaying(), 1);
    state.apply(Action::ReplayReachedEnd { session, partition: P });
    assert_eq!(state.replaying(), 0);
}

#[test]
fn a_primary_that_lost_writes_is_replayed_from_its_own_marker() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let ids = work(&state.apply(Action::Delivered((100..120).map(|offset| record(P, offset)).collect())));
    state.apply(Action::Answered(ids));
    assert_eq!(settled(&state, P), Some(119));
    let effects = state.apply(Action::CacheConnected { generation: 2, marker: marker(&[(P, 70)]) });
    assert_eq!(settled(&state, P), Some(70), "nothing above the marker may be remembered any more");
    let request = located_request(&effects);
    let effects = state.apply(Action::Located { request, logs: vec![(P, Log { low: 0, high: 125, since: Some(60) })] });
    assert_eq!(replay_of(&effects).unwrap().1, [(P, 60..120)]);
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::AssignLive(_))), "live consumption goes on where it was");
}

#[test]
fn a_primary_without_any_marker_is_replayed_from_the_oldest_record() {
    let (mut state, _) = running();
    let effects = state.apply(Action::CacheConnected { generation: 2, marker: Marker::default() });
    assert_eq!(settled(&state, P), None);
    let request = located_request(&effects);
    let effects = state.apply(Action::Located { request, logs: vec![(P, Log { low: 3, high: 100, since: None })] });
    assert_eq!(replay_of(&effects).unwrap().1, [(P, 3..100)]);
}

#[test]
fn a_second_connection_during_a_replay_does_not_forget_the_first() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..80);
    let effects = state.apply(Action::CacheConnected { generation: 2, marker: marker(&[(P, 95)]) });
    let question = find(&effects, |effect| if let Effect::Locate { partitions, .. } = effect { Some(partitions.clone()) } else { None });
    assert_eq!(question.unwrap(), [(P, Some(point(79)))], "the first primary still misses what lies above 79");
}

#[test]
fn an_answer_of_the_broker_to_an_older_question_is_ignored() {
    let mut state = state();
    state.apply(Action::Assigned(vec![P]));
    let first = located_request(&state.apply(Action::Recalled { generation: 1, marker: marker(&[(P, 50)]) }));
    let second = located_request(&state.apply(Action::CacheConnected { generation: 2, marker: marker(&[(P, 20)]) }));
    let log = Log { low: 0, high: 100, since: Some(10) };
    let effects = state.apply(Action::Located { request: first, logs: vec![(P, log)] });
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::AssignLive(_))));
    let effects = state.apply(Action::Located { request: second, logs: vec![(P, log)] });
    assert_eq!(replay_of(&effects).unwrap().1, [(P, 10..100)]);
}

#[test]
fn records_of_an_ended_replay_are_ignored() {
    let (mut state, session) = running();
    state.apply(Action::CacheConnected { generation: 2, marker: marker(&[(P, 50)]) });
    let effects = state.apply(Action::Replayed { session: session + 7, records: vec![record(P, 41)] });
    assert!(effects.is_empty());
}

#[test]
fn a_marker_of_another_log_is_a_gap_and_everything_is_replayed() {
    let (mut state, session) = running();
    let mut other = record(P, 50);
    other.point.time_ms += 1;
    let effects = state.apply(Action::Replayed { session, records: vec![record(P, 49), other, record(P, 51)] });
    assert!(find(&effects, |effect| matches!(effect, Effect::Gap { cause: GapCause::Recreated, .. }).then_some(())).is_some());
    assert_eq!(replay_of(&effects).unwrap().1, [(P, 0..100)]);
    assert_eq!(settled(&state, P), None);
}

#[test]
fn a_log_that_starts_after_the_marker_is_a_gap() {
    let mut state = state();
    state.apply(Action::Assigned(vec![P]));
    let request = located_request(&state.apply(Action::Recalled { generation: 1, marker: marker(&[(P, 50)]) }));
    let effects = state.apply(Action::Located { request, logs: vec![(P, Log { low: 60, high: 100, since: Some(60) })] });
    assert!(matches!(effects[0], Effect::Gap { cause: GapCause::Retention, .. }));
}

#[test]
fn a_log_that_lost_the_live_position_is_located_anew() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let request = located_request(&state.apply(Action::LiveOutOfRange));
    let effects = state.apply(Action::Located { request, logs: vec![(P, Log { low: 0, high: 5, since: None })] });
    assert!(matches!(effects[0], Effect::Gap { cause: GapCause::Recreated, .. }));
    assert!(effects.iter().any(|effect| matches!(effect, Effect::AssignLive(from) if *from == [(P, 5)])));
    assert_eq!(replay_of(&effects).unwrap().1, [(P, 0..5)]);
}

#[test]
fn offsets_are_committed_up_to_the_watermark_and_once() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let ids = work(&state.apply(Action::Delivered((100..103).map(|offset| record(P, offset)).collect())));
    state.apply(Action::Answered(vec![ids[0], ids[2]]));
    let commit = |effects: Vec<Effect>| find(&effects, |effect| if let Effect::Commit(next) = effect { Some(next.clone()) } else { None });
    assert_eq!(commit(state.apply(Action::CommitDue)), Some(vec![(P, 101)]));
    assert_eq!(commit(state.apply(Action::CommitDue)), None);
}

#[test]
fn a_poison_record_is_forgotten_then_set_aside_then_passed() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let effects = state.apply(Action::Delivered(vec![raw(P, 100, "v2:x", b"{}"), record(P, 101)]));
    let ids = work(&effects);
    let effects = state.apply(Action::Answered(ids.clone()));
    let letter = find(&effects, |effect| if let Effect::DeadLetter(letter) = effect { Some(letter.id) } else { None });
    assert_eq!(letter, Some(ids[0]));
    assert_eq!(settled(&state, P), Some(99), "not committed past before the dead letter is stored");
    state.apply(Action::SetAside(ids[0]));
    assert_eq!((settled(&state, P), state.in_flight()), (Some(101), 0));
}

#[test]
fn what_is_in_flight_is_bounded_and_a_silent_cache_pauses_consumption() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let mut next = 100;
    let mut ids = Vec::new();
    while state.wants_live() {
        ids.extend(work(&state.apply(Action::Delivered((next..next + 256).map(|offset| record(P, offset)).collect()))));
        next += 256;
    }
    assert!(state.in_flight() < MAX_IN_FLIGHT + 256);
    let paused =
        (0..FULL_TICKS_BEFORE_PAUSE).flat_map(|_| state.apply(Action::Tick)).filter(|effect| matches!(effect, Effect::Pause)).count();
    assert_eq!(paused, 1);
    assert!(state.wants_live(), "a paused consumer is polled, to keep its place in the group");
    state.apply(Action::Answered(ids));
    assert!(state.apply(Action::Tick).iter().any(|effect| matches!(effect, Effect::Resume)));
}

#[test]
fn a_revoked_partition_is_finished_before_it_is_given_up() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let ids = work(&state.apply(Action::Delivered(vec![record(P, 100)])));
    let effects = state.apply(Action::Revoked);
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Release { .. })));
    assert!(state.apply(Action::Delivered(vec![record(P, 101)])).is_empty(), "nothing new is taken in");
    let effects = state.apply(Action::Answered(ids));
    assert!(matches!(&effects[..], [Effect::Release { next, .. }] if *next == [(P, 101)]), "{effects:?}");
}

#[test]
fn a_revoked_partition_is_left_uncommitted_when_the_cache_does_not_answer() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    state.apply(Action::Delivered(vec![record(P, 100)]));
    state.apply(Action::Revoked);
    let released = (0..TICKS_TO_DRAIN)
        .flat_map(|_| state.apply(Action::Tick))
        .find_map(|effect| if let Effect::Release { next, .. } = effect { Some(next) } else { None });
    assert_eq!(released.unwrap(), [(P, 100)]);
}

#[test]
fn stopping_gives_everything_up_and_then_closes() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..60);
    let effects = state.apply(Action::Stop);
    assert!(matches!(effects.last(), Some(Effect::Close)), "{effects:?}");
    let released = find(&effects, |effect| if let Effect::Release { next, .. } = effect { Some(next.clone()) } else { None });
    assert_eq!(released.unwrap(), [(P, 60)], "what is replayed counts, what is not is left");
    assert_eq!(replay_of(&effects).unwrap().1, []);
}

#[test]
fn an_answer_from_an_earlier_ownership_changes_nothing() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let ids = work(&state.apply(Action::Delivered(vec![record(P, 100)])));
    state.apply(Action::Revoked);
    for _ in 0..TICKS_TO_DRAIN {
        state.apply(Action::Tick);
    }
    state.apply(Action::Assigned(vec![P]));
    let request = located_request(&state.apply(Action::Recalled { generation: 1, marker: marker(&[(P, 99)]) }));
    state.apply(Action::Located { request, logs: vec![(P, Log { low: 0, high: 101, since: Some(100) })] });
    state.apply(Action::Answered(ids));
    assert_eq!((settled(&state, P), state.in_flight()), (Some(99), 0));
}

#[test]
fn live_consumption_starts_once_every_partition_is_located() {
    let mut state = state();
    state.apply(Action::Assigned(vec![P, Q]));
    let request = located_request(&state.apply(Action::Recalled { generation: 1, marker: Marker::default() }));
    let effects = state.apply(Action::Located {
        request,
        logs: vec![(P, Log { low: 0, high: 0, since: None }), (Q, Log { low: 0, high: 9, since: None })],
    });
    assert!(matches!(&effects[0], Effect::AssignLive(from) if *from == [(P, 0), (Q, 9)]));
    assert_eq!(replay_of(&effects).unwrap().1, [(Q, 0..9)]);
}

#[test]
fn a_new_epoch_that_lost_commits_is_a_gap_once() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let gaps =
        |effects: Vec<Effect>| effects.iter().filter(|effect| matches!(effect, Effect::Gap { cause: GapCause::NewEpoch, .. })).count();
    assert_eq!(gaps(state.apply(Action::Delivered(vec![record_of(P, 100, 8, EpochCause::Crash)]))), 0);
    let promoted = |offset| record_of(P, offset, 9, EpochCause::Promoted);
    assert_eq!(gaps(state.apply(Action::Delivered(vec![promoted(101), promoted(102)]))), 1);
    assert_eq!(gaps(state.apply(Action::Delivered(vec![promoted(103)]))), 0, "an epoch that was met is no news");
    assert_eq!(gaps(state.apply(Action::Delivered(vec![record_of(P, 104, 6, EpochCause::Restored)]))), 0, "the region was not there then");
}

fn sweep_of(effects: &[Effect]) -> Option<u32> {
    find(effects, |effect| if let Effect::Sweep(number) = effect { Some(*number) } else { None })
}

fn remembered(effects: &[Effect]) -> Marker {
    find(effects, |effect| if let Effect::Remember { marker, .. } = effect { Some(marker.clone()) } else { None })
        .expect("a marker to write")
}

#[test]
fn epochs_that_lost_commits_are_gaps_in_whatever_order_they_arrive() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let gaps = |effects: &[Effect]| effects.iter().filter(|effect| matches!(effect, Effect::Gap { .. })).count();
    let records = vec![record_of(P, 100, 20, EpochCause::Restart), record_of(P, 101, 10, EpochCause::Promoted)];
    assert_eq!(gaps(&state.apply(Action::Delivered(records))), 1);
}

#[test]
fn an_owed_sweep_is_remembered_before_it_begins_and_until_it_is_done() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let effects = state.apply(Action::Delivered(vec![record_of(P, 100, 9, EpochCause::Promoted)]));
    assert!(matches!(effects[..3], [Effect::Gap { .. }, Effect::Remember { .. }, Effect::Sweep(_)]), "{effects:?}");
    let owed = remembered(&effects).sweeps;
    assert_eq!(owed.len(), 1);
    let number = sweep_of(&effects).unwrap();
    state.apply(Action::Swept(number + 1));
    assert!(state.sweeping(), "another sweep's end is not this one's");
    let done = remembered(&state.apply(Action::Swept(number)));
    assert_eq!((done.sweeps.len(), done.swept), (0, owed));
    assert!(!state.sweeping());
}

#[test]
fn a_sweep_that_a_crash_interrupted_is_begun_again() {
    let mut state = state();
    state.apply(Action::Assigned(vec![P]));
    let sweeps = std::collections::BTreeSet::from(["epoch 9 of shop".to_owned()]);
    let effects = state.apply(Action::Recalled { generation: 1, marker: Marker { sweeps, ..marker(&[(P, 50)]) } });
    assert!(sweep_of(&effects).is_some());
}

#[test]
fn a_primary_restored_from_before_a_sweep_is_swept_again() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let effects = state.apply(Action::Delivered(vec![record_of(P, 100, 9, EpochCause::Promoted)]));
    state.apply(Action::Swept(sweep_of(&effects).unwrap()));
    let current = remembered(&state.apply(Action::MarkerDue));
    assert!(sweep_of(&state.apply(Action::CacheConnected { generation: 2, marker: current })).is_none());
    assert!(sweep_of(&state.apply(Action::CacheConnected { generation: 3, marker: marker(&[(P, 70)]) })).is_some());
}

#[test]
fn a_second_gap_during_a_sweep_starts_it_over() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let first = sweep_of(&state.apply(Action::Delivered(vec![record_of(P, 100, 9, EpochCause::Promoted)]))).unwrap();
    let second = sweep_of(&state.apply(Action::Delivered(vec![record_of(P, 101, 11, EpochCause::Promoted)]))).unwrap();
    state.apply(Action::Swept(first));
    assert!(state.sweeping());
    assert_eq!(remembered(&state.apply(Action::Swept(second))).swept.len(), 2);
}

#[test]
fn retention_that_overtakes_a_replay_is_a_gap_and_the_replay_goes_on() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..60);
    let request = located_request(&state.apply(Action::ReplayOutOfRange { session }));
    let effects = state.apply(Action::Located { request, logs: vec![(P, Log { low: 90, high: 100, since: Some(90) })] });
    assert!(matches!(effects[0], Effect::Gap { cause: GapCause::Retention, .. }));
    assert_eq!(replay_of(&effects).unwrap().1, [(P, 90..100)]);
    let (session, _) = replay_of(&effects).unwrap();
    replay_all(&mut state, session, 90..100);
    assert_eq!(settled(&state, P), Some(99));
}

#[test]
fn a_gap_that_was_met_is_not_met_again_at_the_next_start() {
    let mut first = state();
    first.apply(Action::Assigned(vec![P]));
    let request = located_request(&first.apply(Action::Recalled { generation: 1, marker: marker(&[(P, 50)]) }));
    let log = Log { low: 60, high: 100, since: Some(60) };
    first.apply(Action::Located { request, logs: vec![(P, log)] });
    let written = remembered(&first.apply(Action::MarkerDue));
    let mut second = state();
    second.apply(Action::Assigned(vec![P]));
    let request = located_request(&second.apply(Action::Recalled { generation: 1, marker: written }));
    let effects = second.apply(Action::Located { request, logs: vec![(P, log)] });
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Gap { .. })), "{effects:?}");
}

#[test]
fn the_point_of_a_recreated_log_is_erased_from_the_marker() {
    let mut state = state();
    state.apply(Action::Assigned(vec![P]));
    let request = located_request(&state.apply(Action::Recalled { generation: 1, marker: marker(&[(P, 50)]) }));
    state.apply(Action::Located { request, logs: vec![(P, Log { low: 0, high: 9, since: None })] });
    assert!(remembered(&state.apply(Action::MarkerDue)).void.contains(&P));
}

#[test]
fn a_partition_without_a_leader_does_not_keep_the_others_waiting() {
    let mut state = state();
    state.apply(Action::Assigned(vec![P, Q]));
    let request = located_request(&state.apply(Action::Recalled { generation: 1, marker: Marker::default() }));
    let log = Log { low: 0, high: 5, since: None };
    let live =
        |effects: Vec<Effect>| find(&effects, |effect| if let Effect::AssignLive(from) = effect { Some(from.clone()) } else { None });
    assert_eq!(live(state.apply(Action::Located { request, logs: vec![(P, log)] })).unwrap(), [(P, 5)]);
    state.apply(Action::Delivered(vec![record(P, 5)]));
    assert_eq!(live(state.apply(Action::Located { request, logs: vec![(Q, log)] })).unwrap(), [(P, 6), (Q, 5)]);
}

#[test]
fn what_waits_behind_a_stuck_record_is_bounded() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    state.apply(Action::Delivered(vec![raw(P, 100, "not allowed", b"{}")]));
    let mut next = 101;
    while state.wants_live() {
        let ids = work(&state.apply(Action::Delivered((next..next + 256).map(|offset| record(P, offset)).collect())));
        state.apply(Action::Answered(ids));
        next += 256;
        assert!(next < 2 * MAX_OUTSTANDING as i64, "nothing bounds the records behind a stuck one");
    }
    assert_eq!(settled(&state, P), Some(99));
}

#[test]
fn a_cache_that_is_away_while_nothing_is_owned_pauses_nothing() {
    let (mut state, session) = running();
    replay_all(&mut state, session, 40..100);
    let mut next = 100;
    while state.wants_live() {
        state.apply(Action::Delivered((next..next + 256).map(|offset| record(P, offset)).collect()));
        next += 256;
    }
    state.apply(Action::Revoked);
    let paused = (0..20).flat_map(|_| state.apply(Action::Tick)).any(|effect| matches!(effect, Effect::Pause));
    assert!(!paused);
    assert!(state.wants_live(), "who owns nothing must hear the group");
}
