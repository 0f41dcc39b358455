//! What reaches NCCL and what it returns, tested with fake functions: no GPU and no library is
//! needed.

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "pointers of the calls that it plays"
)]
mod fake;

use fake::{answer, calls, functions, library, made, within};
use nccl_rs::ffi::IN_PROGRESS;
use nccl_rs::{
    Code, Communicator, Config, CtaPolicy, DataType, Error, Nccl, RedOp, Scalar, State, Stream,
    UniqueId, WindowKind,
};
use std::ffi::{CString, c_void};
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

const STREAM: Stream = Stream(std::ptr::without_provenance_mut(0x99));

fn at(address: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(address)
}

fn id() -> UniqueId {
    UniqueId::from_bytes([7; 128])
}

fn comm(nccl: &Nccl, size: u32, rank: u32) -> Communicator {
    let comm = Communicator::init(nccl, &id(), size, rank, Config::default()).unwrap();
    calls();
    comm
}

#[test]
fn a_life_in_good_order() {
    let nccl = library(functions());
    assert_eq!(nccl.version().to_string(), "2.28.9");
    assert_eq!(nccl.unique_id().unwrap(), id());
    let config = Config {
        max_ctas: Some(8),
        cta_policy: Some(CtaPolicy::Zero),
        ..Config::default()
    };
    let comm = Communicator::init(&nccl, &id(), 4, 2, config).unwrap();
    let raw = fake::CONFIG.get().unwrap();
    assert_eq!((raw.size, raw.magic, raw.version), (80, 0xcafe_beef, 22809));
    assert_eq!((raw.max_ctas, raw.cta_policy), (8, 2));
    assert_eq!((comm.size(), comm.rank()), (4, 2));
    assert_eq!(
        (comm.count(), comm.user_rank(), comm.device()),
        (Ok(4), Ok(2), Ok(3))
    );
    assert_eq!(comm.poll(), Ok(State::Ready));
    comm.finalize().unwrap();
    comm.destroy().unwrap();
    assert_eq!(
        calls(),
        ["unique id", "init 2/4 id 7", "finalize", "destroy"]
    );
    drop(self::comm(&nccl, 2, 0));
    assert_eq!(calls(), ["destroy"]);
}

#[test]
fn arguments_arrive_in_their_places() {
    let nccl = library(functions());
    let c = comm(&nccl, 4, 1);
    let (s, r, n) = (at(0xa0).cast_const(), at(0xb0), 5);
    let (f32, op) = (DataType::F32, RedOp::AVG);
    // SAFETY: the pointers are never dereferenced.
    unsafe {
        c.all_gather(s, r, n, DataType::BF16, STREAM).unwrap();
        c.reduce_scatter(s, r, n, f32, op, STREAM).unwrap();
        c.all_reduce(s, r, n, f32, RedOp::MAX, STREAM).unwrap();
        c.reduce(s, r, n, f32, op, 3, STREAM).unwrap();
        c.broadcast(s, r, n, f32, 2, STREAM).unwrap();
        c.gather(s, r, n, f32, 0, STREAM).unwrap();
        c.scatter(s, r, n, f32, 1, STREAM).unwrap();
        c.all_to_all(s, r, n, f32, STREAM).unwrap();
        c.send(s, n, f32, 3, STREAM).unwrap();
        c.recv(r, n, f32, 0, STREAM).unwrap();
    }
    assert_eq!(
        calls(),
        [
            "all gather 0xa0 0xb0 5 type 9 stream 0x99",
            "reduce scatter 0xa0 0xb0 5 type 7 op 4 stream 0x99",
            "all reduce 0xa0 0xb0 5 type 7 op 2 stream 0x99",
            "reduce 0xa0 0xb0 5 type 7 op 4 root 3 stream 0x99",
            "broadcast 0xa0 0xb0 5 type 7 root 2 stream 0x99",
            "gather 0xa0 0xb0 5 type 7 root 0 stream 0x99",
            "scatter 0xa0 0xb0 5 type 7 root 1 stream 0x99",
            "all to all 0xa0 0xb0 5 type 7 stream 0x99",
            "send 0xa0 5 type 7 to 3 stream 0x99",
            "recv 0xb0 5 type 7 from 0 stream 0x99",
        ]
    );
    // SAFETY: as above.
    let wrong = unsafe { c.broadcast(s, r, n, f32, 4, STREAM) }.unwrap_err();
    assert_eq!(wrong.to_string(), "ncclBroadcast: there is no rank 4 of 4");
    let wrong = Communicator::init(&nccl, &id(), 4, 4, Config::default()).unwrap_err();
    assert_eq!(
        wrong.to_string(),
        "ncclCommInitRankConfig: there is no rank 4 of 4"
    );
    assert!(calls().is_empty());
}

#[test]
fn an_all_to_all_of_older_libraries_is_a_group() {
    let mut older = functions();
    older.all_to_all = None;
    let nccl = library(older);
    let c = comm(&nccl, 2, 0);
    // SAFETY: the pointers are never dereferenced.
    unsafe { c.all_to_all(at(0x100), at(0x200), 3, DataType::F32, STREAM) }.unwrap();
    assert_eq!(
        calls(),
        [
            "group start",
            "send 0x100 3 type 7 to 0 stream 0x99",
            "recv 0x200 3 type 7 from 0 stream 0x99",
            "send 0x10c 3 type 7 to 1 stream 0x99",
            "recv 0x20c 3 type 7 from 1 stream 0x99",
            "group end"
        ]
    );
}

#[test]
fn missing_functions_are_errors_when_they_are_called() {
    let mut older = functions();
    older.comm_window_register = None;
    older.group_simulate_end = None;
    older.comm_split = None;
    let nccl = library(older);
    assert!(nccl.has("ncclAllGather") && !nccl.has("ncclCommSplit") && !nccl.has("ncclNonsense"));
    let c = comm(&nccl, 2, 0);
    // SAFETY: nothing is registered.
    let error = unsafe { c.window(at(0), 0, WindowKind::Plain) }.unwrap_err();
    assert_eq!(
        error.to_string(),
        "ncclCommWindowRegister is not in the loaded NCCL 2.28.9"
    );
    assert!(matches!(
        nccl.simulate(|| Ok::<(), Error>(())),
        Err(Error::Unsupported { .. })
    ));
    assert!(c.split(Some(0), 0, None).is_err());
    assert!(calls().is_empty());
}

#[test]
fn errors_have_all_of_ncclss_words_and_end_in_an_abort() {
    let nccl = library(functions());
    let c = comm(&nccl, 2, 0);
    answer(5);
    // SAFETY: the pointers are never dereferenced.
    let error = unsafe { c.all_gather(at(1), at(2), 3, DataType::F32, STREAM) }.unwrap_err();
    assert_eq!(
        error.to_string(),
        "ncclAllGather: ncclInvalidUsage (5): invalid usage; line 1 of its reason"
    );
    assert_eq!(error.code(), Some(Code::INVALID_USAGE));
    calls();
    // The other ranks may never destroy it.
    drop(c);
    assert_eq!(calls(), ["abort"]);
    answer(3);
    let error = Communicator::init(&nccl, &id(), 2, 0, Config::default()).unwrap_err();
    assert!(error.to_string().contains("ncclInternalError"), "{error}");
    // There is nothing to free.
    assert_eq!(calls(), ["init 0/2 id 7"]);
    // Unknown results are preserved.
    answer(42);
    let error = nccl.unique_id().unwrap_err();
    assert_eq!(error.code(), Some(Code(42)));
}

#[test]
fn groups_end_whatever_happens() {
    let nccl = library(functions());
    let c = comm(&nccl, 2, 0);
    // SAFETY: the pointers are never dereferenced.
    let send = || unsafe { c.send(at(1), 1, DataType::U8, 1, STREAM) };
    nccl.group(send).unwrap();
    assert_eq!(
        calls(),
        [
            "group start",
            "send 0x1 1 type 1 to 1 stream 0x99",
            "group end"
        ]
    );
    // The closure's error takes precedence.
    let other = |_: Error| "mine".to_owned();
    #[derive(Debug, PartialEq)]
    struct Mine(String);
    impl From<Error> for Mine {
        fn from(e: Error) -> Self {
            Self(e.to_string())
        }
    }
    fake::GROUP_END.set(3);
    let result: Result<(), Mine> = nccl.group(|| Err(Mine(other(Error::Busy))));
    assert_eq!(result, Err(Mine("mine".into())));
    // An error at the group's end is reported.
    fake::GROUP_END.set(3);
    let error = nccl.group(send).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("ncclGroupEnd: ncclInternalError"),
        "{error}"
    );
    calls();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        nccl.group(|| -> Result<(), Error> { panic!("in the middle") })
    }));
    assert!(panicked.is_err());
    assert_eq!(calls(), ["group start", "group end"]);
    // No group is open now: calls with an immediate result are allowed again.
    assert!(c.split(Some(0), 0, None).is_ok());
    calls();
    let refused = nccl.group(|| c.split(Some(0), 0, None)).unwrap_err();
    assert!(refused.to_string().contains("within a group"), "{refused}");
    assert_eq!(calls(), ["group start", "group end"]);
}

#[test]
fn an_estimate_launches_nothing() {
    let nccl = library(functions());
    let c = comm(&nccl, 2, 0);
    let time = nccl.simulate(|| {
        // SAFETY: the pointers are never dereferenced.
        unsafe { c.all_gather(at(1), at(2), 3, DataType::F32, STREAM) }
    });
    assert_eq!(time, Ok(Some(Duration::from_nanos(12_500))));
    assert_eq!(
        calls(),
        [
            "group start",
            "all gather 0x1 0x2 3 type 7 stream 0x99",
            "simulate end"
        ]
    );
}

#[test]
fn reductions_with_a_factor_keep_their_number() {
    let nccl = library(functions());
    let c = comm(&nccl, 4, 0);
    let sum = c.pre_mul_sum(Scalar::bf16(0.25)).unwrap();
    assert_eq!(fake::SCALAR.get(), (0x3e80, 9, 1));
    assert_eq!(sum.op(), RedOp(0x7eed_0001));
    // SAFETY: the pointers are never dereferenced.
    unsafe { c.all_reduce(at(1), at(1), 1, DataType::BF16, sum.op(), STREAM) }.unwrap();
    assert!(
        calls()[1].contains("op 2129461249"),
        "the number that it was given"
    );
    drop(sum);
    assert_eq!(calls(), ["op gone 0x7eed0001"]);
    let sum = c.pre_mul_sum(Scalar::F32(0.5)).unwrap();
    assert_eq!(fake::SCALAR.get(), (0x3f00_0000, 7, 1));
    calls();
    // Freed with its communicator.
    drop(c);
    drop(sum);
    assert_eq!(calls(), ["destroy"]);
}

#[test]
fn memory_is_given_back() {
    let nccl = library(functions());
    let c = comm(&nccl, 2, 0);
    let memory = nccl.mem_alloc(64).unwrap();
    assert_eq!((memory.as_ptr(), memory.bytes()), (at(0x1000), 64));
    // SAFETY: the memory outlives the registrations.
    unsafe {
        let a = c.register(memory.as_ptr(), 64).unwrap();
        let b = c
            .window(memory.as_ptr(), 64, WindowKind::Symmetric)
            .unwrap();
        assert!(b.is_some());
        let none = c.window(memory.as_ptr(), 63, WindowKind::Plain).unwrap();
        assert!(none.is_none());
        drop((b, a));
    }
    drop(memory);
    assert_eq!(
        calls(),
        [
            "mem alloc 64",
            "register 0x1000 64",
            "window 0x1000 64 flags 1",
            "window 0x1000 63 flags 0",
            "window gone 0x52",
            "deregister 0x51",
            "mem free 0x1000"
        ]
    );
}

#[test]
fn splits_know_their_place() {
    let nccl = library(functions());
    let c = comm(&nccl, 8, 5);
    let half = c.split(Some(1), 3, None).unwrap().unwrap();
    assert_eq!((half.size(), half.rank()), (4, 3));
    assert!(c.split(None, 0, Some(Config::default())).unwrap().is_none());
    assert_eq!(
        calls(),
        [
            "split colour 1 key 3 inherits true",
            "split colour -1 key 0 inherits false"
        ]
    );
}

#[test]
fn what_does_not_block_is_waited_for() {
    let nccl = library(functions());
    let config = Config {
        blocking: Some(false),
        ..Config::default()
    };
    answer(IN_PROGRESS);
    let c = Communicator::init(&nccl, &id(), 2, 0, config).unwrap();
    assert_eq!(fake::CONFIG.get().unwrap().blocking, 0);
    c.wait_ready(Duration::from_secs(60), || false).unwrap();
    answer(IN_PROGRESS);
    c.finalize().unwrap();
    // A group completes later: nothing is awaited inside.
    fake::GROUP_END.set(IN_PROGRESS);
    nccl.group(|| {
        answer(IN_PROGRESS);
        // SAFETY: the pointers are never dereferenced.
        unsafe { c.send(at(1), 1, DataType::U8, 1, STREAM) }
    })
    .unwrap();
}

#[test]
fn another_thread_sees_errors_and_aborts() {
    let nccl = library(functions());
    let c = comm(&nccl, 2, 0);
    let watch = c.watch();
    assert_eq!(watch.poll(), Ok(State::Ready));
    let other = std::thread::spawn({
        let watch = watch.clone();
        move || {
            watch.abort(Duration::from_secs(60)).unwrap();
            calls()
        }
    });
    assert_eq!(other.join().unwrap(), ["abort"]);
    assert!(watch.is_aborted());
    // SAFETY: the pointers are never dereferenced.
    let error = unsafe { c.send(at(1), 1, DataType::U8, 1, STREAM) }.unwrap_err();
    assert_eq!(
        error.to_string(),
        "ncclSend: the communicator has been aborted"
    );
    assert!(matches!(watch.poll(), Err(Error::Aborted { .. })));
    // Freed once.
    watch.abort(Duration::ZERO).unwrap();
    drop(c);
    assert!(calls().is_empty());
}

/// Longer than anything in these tests takes.
const LONG: Duration = Duration::from_secs(60);
/// Timeout of waits for events that never happen.
const SHORT: Duration = Duration::from_millis(50);

fn freed(comm: &fake::Comm) -> usize {
    comm.freed.load(Ordering::SeqCst)
}

fn send_one(c: &Communicator) -> Result<(), Error> {
    // SAFETY: the pointers are never dereferenced.
    unsafe { c.send(at(1), 1, DataType::U8, 1, STREAM) }
}

#[test]
fn a_group_keeps_its_communicators_alive() {
    let nccl = library(functions());
    let (inside, is_inside) = channel();
    let (go_on, may_go_on) = channel();
    let thread = std::thread::spawn(move || {
        let c = comm(&nccl, 2, 0);
        within("group end", {
            let (watch, raw) = (c.watch(), made());
            move || {
                inside.send((watch, raw)).unwrap();
                let _ = may_go_on.recv();
            }
        });
        nccl.group(|| send_one(&c)).unwrap();
        calls();
        // Closed meanwhile: no new call begins, and it is freed by an abort.
        assert!(matches!(send_one(&c), Err(Error::Aborted { .. })));
        drop(c);
        assert_eq!(calls(), ["abort"]);
    });
    let (watch, raw) = is_inside.recv_timeout(LONG).unwrap();
    assert_eq!(watch.abort(SHORT), Err(Error::Busy));
    assert_eq!(freed(raw), 0, "freed while the group's end uses it");
    go_on.send(()).unwrap();
    thread.join().unwrap();
    assert_eq!(freed(raw), 1);
    watch.abort(SHORT).unwrap();
    assert_eq!(freed(raw), 1);
}

/// The thread of the open group has handed the communicator to another one.
#[test]
fn an_owner_that_aborts_does_not_wait_for_a_group_of_others() {
    let nccl = library(functions());
    let c = comm(&nccl, 2, 0);
    let raw = made();
    let (aborted, has_aborted) = channel();
    nccl.group(|| {
        send_one(&c)?;
        std::thread::spawn(move || aborted.send(c.abort()));
        let end = has_aborted.recv_timeout(LONG);
        assert_eq!(end, Ok(Err(Error::Busy)), "it waits");
        assert_eq!(freed(raw), 0, "freed within the group");
        Ok::<_, Error>(())
    })
    .unwrap();
    assert_eq!(freed(raw), 1);
    assert_eq!(calls().last().map(String::as_str), Some("abort"));
}

#[test]
fn what_is_made_in_a_group_is_kept_until_its_end() {
    let nccl = library(functions());
    let (looked, look) = channel();
    let join = || Communicator::init(&nccl, &id(), 2, 0, Config::default());
    let c = nccl.group(|| {
        let c = join()?;
        let (watch, raw) = (c.watch(), made());
        within("group end", move || {
            let other = std::thread::spawn(move || (watch.abort(SHORT), freed(raw)));
            let _ = looked.send(other.join().unwrap());
        });
        Ok::<_, Error>(c)
    });
    assert_eq!(look.recv_timeout(LONG).unwrap(), (Err(Error::Busy), 0));
    drop(c);
    calls();
    // Communicators that are freed in a group are freed after it, in the way that the group's end
    // requires, whether the group has used them or not.
    let (a, b) = (comm(&nccl, 2, 0), comm(&nccl, 2, 0));
    nccl.group(|| {
        send_one(&a)?;
        assert!(a.watch().abort(LONG).is_err(), "not in a group");
        drop(a);
        // The end of a nested group frees nothing.
        nccl.group(|| b.destroy())
    })
    .unwrap();
    assert_eq!(
        calls(),
        [
            "group start",
            "send 0x1 1 type 1 to 1 stream 0x99",
            "group start",
            "group end",
            "group end",
            "destroy",
            "destroy"
        ]
    );
    let c = comm(&nccl, 2, 0);
    fake::GROUP_END.set(3);
    let error = nccl.group(|| send_one(&c)).unwrap_err();
    assert_eq!(error.code(), Some(Code::INTERNAL_ERROR));
    calls();
    // Its calls may or may not have been made: the other ranks may never destroy it.
    c.destroy().unwrap();
    assert_eq!(calls(), ["abort"]);
    // The error of a communicator that is freed at the end is reported.
    let c = comm(&nccl, 2, 0);
    let error = nccl.group(|| {
        c.destroy()?;
        answer(6);
        Ok::<_, Error>(())
    });
    assert_eq!(error.unwrap_err().code(), Some(Code::REMOTE_ERROR));
}

#[test]
fn other_threads_wait_for_a_group() {
    let nccl = library(functions());
    let c = comm(&nccl, 2, 0);
    let sum = c.pre_mul_sum(Scalar::F32(0.5)).unwrap();
    let (done, is_done) = channel();
    let (waited, has_waited) = channel();
    within("group end", move || {
        std::thread::spawn(move || {
            drop(sum);
            done.send(calls()).unwrap();
        });
        let early = is_done.recv_timeout(SHORT).ok();
        waited.send((early, is_done)).unwrap();
    });
    nccl.group(|| send_one(&c)).unwrap();
    let (early, is_done) = has_waited.recv().unwrap();
    assert_eq!(early, None, "concurrently with the group's end");
    assert_eq!(is_done.recv_timeout(LONG).unwrap(), ["op gone 0x7eed0001"]);
}

#[test]
fn a_wait_is_no_place_to_be_stuck() {
    let nccl = library(functions());
    let config = Config {
        blocking: Some(false),
        ..Config::default()
    };
    let (inside, is_inside) = channel();
    let thread = std::thread::spawn(move || {
        let c = Communicator::init(&nccl, &id(), 2, 0, config).unwrap();
        made().under_way.store(-1, Ordering::SeqCst);
        inside.send((c.watch(), made())).unwrap();
        answer(IN_PROGRESS);
        c.finalize()
    });
    let (watch, raw) = is_inside.recv_timeout(LONG).unwrap();
    std::thread::sleep(SHORT);
    watch.abort(LONG).unwrap();
    assert_eq!(freed(raw), 1);
    let ended = thread.join().unwrap();
    assert!(matches!(ended, Err(Error::Aborted { .. })), "{ended:?}");
    assert_eq!(freed(raw), 1);
}

#[test]
fn two_do_not_look_at_what_does_not_block() {
    let nccl = library(functions());
    for (blocking, state, looks) in [
        (Some(true), State::Ready, 1),
        // A thread that queries the state may join NCCL's thread, as the call itself may.
        (Some(false), State::InProgress, 0),
    ] {
        let config = Config {
            blocking,
            ..Config::default()
        };
        let c = Communicator::init(&nccl, &id(), 2, 0, config).unwrap();
        let (watch, raw) = (c.watch(), made());
        let (looked, look) = channel();
        within("send", move || {
            let seen = std::thread::spawn(move || watch.poll()).join().unwrap();
            let _ = looked.send((seen, raw.looks.load(Ordering::SeqCst)));
        });
        send_one(&c).unwrap();
        assert_eq!(look.recv(), Ok((Ok(state), looks)));
        assert_eq!(c.watch().poll(), Ok(State::Ready));
    }
}

#[test]
fn a_call_that_does_not_return_keeps_its_communicator() {
    let nccl = library(functions());
    let (inside, is_inside) = channel();
    let (go_on, may_go_on) = channel();
    let thread = std::thread::spawn(move || {
        let c = comm(&nccl, 2, 0);
        let (watch, raw) = (c.watch(), made());
        within("send", move || {
            inside.send((watch, raw)).unwrap();
            let _ = may_go_on.recv();
        });
        send_one(&c).unwrap();
    });
    let (watch, raw) = is_inside.recv_timeout(LONG).unwrap();
    assert_eq!(watch.abort(SHORT), Err(Error::Busy));
    assert_eq!(freed(raw), 0);
    go_on.send(()).unwrap();
    thread.join().unwrap();
    assert_eq!(freed(raw), 1);
}

#[test]
fn what_is_under_way_is_not_destroyed() {
    let nccl = library(functions());
    let join = || {
        let c = comm(&nccl, 2, 0);
        made().under_way.store(3, Ordering::SeqCst);
        c
    };
    drop(join());
    assert_eq!(calls(), ["abort"]);
    join().destroy().unwrap();
    assert_eq!(calls(), ["destroy"]);
    let c = comm(&nccl, 2, 0);
    made().state.store(6, Ordering::SeqCst);
    assert_eq!(c.destroy().unwrap_err().code(), Some(Code::REMOTE_ERROR));
    assert_eq!(calls(), ["abort"]);
}

#[test]
fn a_split_that_is_late_has_its_place() {
    let nccl = library(functions());
    fake::LATE.set(true);
    let parent = || {
        let mut c = comm(&nccl, 8, 5);
        c.set_timeout(LONG);
        (c, made())
    };
    // NCCL reports success at once and writes the handle later.
    let (c, raw) = parent();
    raw.under_way.store(3, Ordering::SeqCst);
    let half = c.split(Some(1), 3, None).unwrap().unwrap();
    assert_eq!((half.size(), half.rank()), (4, 3));
    drop((half, c));
    assert_eq!(freed(raw.child()), 1);
    calls();
    // Too late, and NCCL writes it while the parent lives.
    let (mut c, raw) = parent();
    c.set_timeout(SHORT);
    raw.under_way.store(-1, Ordering::SeqCst);
    let error = c.split(Some(1), 3, None).unwrap_err();
    assert!(matches!(error, Error::NotReady { .. }), "{error}");
    // Reuses the memory of the location if it is free.
    let others: Vec<_> = (0..64).map(|i| comm(&nccl, 2, i % 2)).collect();
    raw.deliver();
    assert!(others.iter().all(|c| c.count() == Ok(2)));
    drop(others);
    calls();
    drop(c);
    assert_eq!(calls(), ["abort", "abort"]);
    assert_eq!((freed(raw), freed(raw.child())), (1, 1));
    // Too late, and the abort of the parent waits for NCCL's thread.
    let (mut c, raw) = parent();
    c.set_timeout(SHORT);
    raw.under_way.store(-1, Ordering::SeqCst);
    assert!(c.split(Some(1), 3, None).is_err());
    let watch = c.watch();
    watch.abort(LONG).unwrap();
    assert_eq!((freed(raw), freed(raw.child())), (1, 1));
    drop(c);
    assert_eq!((freed(raw), freed(raw.child())), (1, 1));
}

#[test]
fn a_split_that_fails_leaves_nothing() {
    let nccl = library(functions());
    let c = comm(&nccl, 8, 5);
    answer(6);
    let error = c.split(Some(1), 3, None).unwrap_err();
    assert_eq!(error.code(), Some(Code::REMOTE_ERROR));
    assert_eq!(freed(made()), 1);
    assert_eq!(calls(), ["split colour 1 key 3 inherits true", "abort"]);
}

#[test]
fn an_inherited_configuration_outlives_the_parent() {
    const NAME: &str = "the name of a communicator";
    let nccl = library(functions());
    let config = Config {
        comm_name: Some(CString::new(NAME).unwrap()),
        ..Config::default()
    };
    let c = Communicator::init(&nccl, &id(), 8, 0, config).unwrap();
    let child = c.split(Some(0), 0, None).unwrap().unwrap();
    let grandchild = child.split(Some(0), 0, None).unwrap().unwrap();
    let raw = made();
    drop(c);
    drop(child);
    // Reuses the memory of the string if it is free.
    let others: Vec<_> = (0..64)
        .map(|_| CString::new("x".repeat(NAME.len())).unwrap())
        .collect();
    assert_eq!(raw.name(), NAME);
    drop((others, grandchild));
}

#[test]
fn no_estimate_where_nccl_would_run_the_calls() {
    let nccl = library(functions());
    let config = Config {
        blocking: Some(false),
        ..Config::default()
    };
    let c = Communicator::init(&nccl, &id(), 2, 0, config).unwrap();
    calls();
    let error = nccl.simulate(|| send_one(&c)).unwrap_err();
    assert!(error.to_string().contains("do not block"), "{error}");
    assert_eq!(calls(), ["group start", "simulate end"]);
    // The group ends with the estimate.
    nccl.group(|| send_one(&c)).unwrap();
    calls();
    // NCCL only counts the end of a nested group.
    let blocks = comm(&nccl, 2, 0);
    let nested = nccl.group(|| nccl.simulate(|| send_one(&blocks)).map(drop));
    assert!(nested.unwrap_err().to_string().contains("within a group"));
    assert_eq!(calls(), ["group start", "group end"]);
}

#[test]
fn a_window_that_is_late_has_its_place() {
    let nccl = library(functions());
    let mut c = comm(&nccl, 2, 0);
    let raw = made();
    raw.under_way.store(3, Ordering::SeqCst);
    // SAFETY: nothing is registered.
    let window = || unsafe { c.window(at(0x1000), 64, WindowKind::Symmetric) };
    let ready = window().unwrap().expect("the handle came later");
    assert_eq!(ready.as_raw(), at(0x52));
    drop(ready);
    c.set_timeout(SHORT);
    raw.under_way.store(-1, Ordering::SeqCst);
    // SAFETY: as above.
    let late = unsafe { c.window(at(0x1000), 64, WindowKind::Symmetric) };
    assert!(matches!(late, Err(Error::NotReady { .. })));
    // NCCL writes to memory that it still owns; the stack's would have been reused.
    let others: Vec<_> = (0..64).map(Box::new).collect();
    raw.deliver();
    assert!((0..64).eq(others.into_iter().map(|x: Box<usize>| *x)));
}

#[test]
fn calls_that_are_not_wrapped_can_be_made() {
    let nccl = library(functions());
    let c = comm(&nccl, 2, 1);
    let mut rank = 0;
    let f = nccl.functions().comm_user_rank;
    // SAFETY: the pointer is valid for a write.
    unsafe { c.call("ncclCommUserRank", |raw| f(raw, &raw mut rank)) }.unwrap();
    assert_eq!(rank, 1);
    // SAFETY: no call is made.
    let error = unsafe { c.call("ncclCommShrink", |_| 5) }.unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("ncclCommShrink: ncclInvalidUsage")
    );
    drop(c);
    assert_eq!(calls(), ["abort"]);
}
