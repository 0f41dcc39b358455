//! Broadcasts the kernels that rank 0 chooses by autotuning, after checking that all ranks can use
//! them.

use crate::base::abort::lock;
use crate::device::Setup;
use crate::kernels::cuda::{Agree, ErrorKind};
use crate::process::{PeerError, ProcessGroup, config_check};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// One rank's access to rank 0's choices.
#[derive(Debug)]
pub(super) struct AutotuneBroadcast {
    peers: Arc<ProcessGroup>,
    session: u32,
    rank: u32,
    ranks: u32,
    /// Choices by name. The same GEMM may be requested again, and another measurement could result
    /// in a different choice.
    made: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl AutotuneBroadcast {
    /// Creates the access of a rank; `None` if there is only one rank.
    pub(super) fn of(setup: &Setup, rank: u32) -> Option<Arc<Self>> {
        let broadcast = Self {
            peers: Arc::clone(setup.world.process_group()),
            session: setup.session,
            rank,
            ranks: setup.world.size(),
            made: Mutex::default(),
        };
        (broadcast.ranks > 1).then(|| Arc::new(broadcast))
    }

    /// Checks that the same kernels fit all ranks. Rank 0 compares everything that determines which
    /// kernels run. Every rank calls it once, before the first choice, and no rank returns before
    /// all have called it.
    ///
    /// # Errors
    /// Returns a message if they do not fit all ranks, or if a rank does not answer. It is equal on
    /// all ranks that rank 0 reaches.
    pub(super) fn check_equal(&self, mine: &[(&str, String)]) -> Result<(), String> {
        let verdict = format!("verdict on kernels {}", self.session);
        let words = |e: PeerError| e.to_string();
        let mine = config_check::encode(mine);
        let sent = if self.rank > 0 {
            let peers = &self.peers;
            peers
                .put_for(&self.facts_of(self.rank), 1, mine)
                .map_err(words)?;
            peers.get_slow(&verdict).map_err(words)?
        } else {
            let sent = self.compare(mine).unwrap_or_else(words).into_bytes();
            let put = self.peers.put_for(&verdict, self.ranks - 1, sent.clone());
            put.map_err(words)?;
            sent
        };
        if sent.is_empty() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&sent).into_owned())
        }
    }

    /// Compares the configurations of all ranks. Returns a message, or an empty string if they are
    /// equal.
    fn compare(&self, mine: Vec<u8>) -> Result<String, PeerError> {
        let others = (1..self.ranks).map(|rank| self.peers.get_slow(&self.facts_of(rank)));
        let all: Vec<Vec<u8>> = std::iter::once(Ok(mine))
            .chain(others)
            .collect::<Result<_, _>>()?;
        Ok(
            config_check::first_difference(&all).map_or_else(String::new, |difference| {
                format!("{difference}: all ranks need the same GPU, libraries and options")
            }),
        )
    }

    /// Returns the key under which a rank publishes its configuration.
    fn facts_of(&self, rank: u32) -> String {
        format!("facts of kernels {} of rank {rank}", self.session)
    }
}

impl Agree for AutotuneBroadcast {
    fn choice(
        &self,
        name: &str,
        choose: &mut dyn FnMut() -> Result<Vec<u8>, ErrorKind>,
    ) -> Result<Vec<u8>, ErrorKind> {
        if let Some(made) = lock(&self.made).get(name) {
            return Ok(made.clone());
        }
        let key = format!("choice {} {name}", self.session);
        let words =
            |e: PeerError| ErrorKind::Ranks(format!("rank 0 published no choice of kernels: {e}"));
        let sent = if self.rank > 0 {
            self.peers.get_slow(&key).map_err(words)?
        } else {
            // Rank 0 also publishes an error, because the other ranks wait for a result.
            let sent = pack(choose());
            self.peers.put(&key, sent.clone()).map_err(words)?;
            sent
        };
        let chosen = unpack(&sent)?;
        lock(&self.made).insert(name.to_owned(), chosen.clone());
        Ok(chosen)
    }
}

const CHOSEN: u8 = 1;
const REFUSED: u8 = 0;

/// Encodes rank 0's choice, or the error if there is no choice.
fn pack(choice: Result<Vec<u8>, ErrorKind>) -> Vec<u8> {
    let (kind, mut bytes) = match choice {
        Ok(chosen) => (CHOSEN, chosen),
        Err(why) => (REFUSED, why.to_string().into_bytes()),
    };
    bytes.insert(0, kind);
    bytes
}

fn unpack(sent: &[u8]) -> Result<Vec<u8>, ErrorKind> {
    match sent.split_first() {
        Some((&CHOSEN, chosen)) => Ok(chosen.to_vec()),
        Some((_, why)) => Err(ErrorKind::Unsupported(
            String::from_utf8_lossy(why).into_owned(),
        )),
        None => Err(ErrorKind::Ranks("rank 0 sent nothing".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_of_four(peers: &Arc<ProcessGroup>, rank: u32, session: u32) -> AutotuneBroadcast {
        AutotuneBroadcast {
            peers: Arc::clone(peers),
            session,
            rank,
            ranks: 4,
            made: Mutex::default(),
        }
    }

    #[test]
    fn an_error_of_rank_0_is_that_of_all_ranks() {
        let peers = Arc::new(ProcessGroup::single());
        let of = |rank: u32| {
            let broadcast = one_of_four(&peers, rank, 0);
            broadcast.choice("conv", &mut || {
                assert_eq!(rank, 0);
                Err(ErrorKind::Library("no engine".to_owned()))
            })
        };
        std::thread::scope(|scope| {
            // They wait for a short time before rank 0 publishes.
            let late: Vec<_> = (1..4).map(|r| scope.spawn(move || of(r))).collect();
            std::thread::sleep(std::time::Duration::from_millis(20));
            let refusal = Err(ErrorKind::Unsupported("no engine".to_owned()));
            assert_eq!(of(0), refusal);
            for rank in late {
                assert_eq!(rank.join().unwrap(), refusal);
            }
        });
    }

    /// Returns the result of each rank for given versions of cuDNN.
    fn check_all(versions: [&str; 4]) -> Vec<Result<(), String>> {
        let peers = Arc::new(ProcessGroup::single());
        let of = &|rank: u32, version: &str| {
            let broadcast = one_of_four(&peers, rank, 2);
            broadcast.check_equal(&[
                ("multiprocessors", "132".to_owned()),
                ("cudnn", version.to_owned()),
            ])
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..)
                .zip(versions)
                .map(|(rank, version)| scope.spawn(move || of(rank, version)))
                .collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_with_other_kernels_end_all_with_the_cause() {
        assert_eq!(check_all(["9.19.0"; 4]), [const { Ok(()) }; 4]);
        let off = config_check::with_reason("none", "--no-cudnn");
        let missing = config_check::with_reason("none", "libcudnn.so.9 was not found");
        assert_eq!(
            check_all([&off, &missing, &off, &off]),
            [const { Ok(()) }; 4]
        );
        let cause = "rank 2 has cudnn=none (--no-cudnn), rank 0 has cudnn=9.19.0: all ranks need the same GPU, libraries and options";
        let refused = Err(cause.to_owned());
        assert_eq!(
            check_all(["9.19.0", "9.19.0", &off, "9.18.0"]),
            [(); 4].map(|()| refused.clone())
        );
    }

    #[test]
    fn every_rank_has_rank_0s_choice() {
        let peers = Arc::new(ProcessGroup::single());
        let of = |rank: u32, session| {
            let broadcast = one_of_four(&peers, rank, session);
            let mut asked = 0;
            let mut choice = || {
                broadcast.choice("m=8", &mut || {
                    asked += 1;
                    Ok(vec![rank as u8, session as u8, asked])
                })
            };
            let first = choice().unwrap();
            assert_eq!(choice().unwrap(), first);
            (first, asked)
        };
        std::thread::scope(|scope| {
            let late: Vec<_> = (1..4).map(|r| scope.spawn(move || of(r, 0))).collect();
            assert_eq!(of(0, 0), (vec![0, 0, 1], 1));
            for rank in late {
                assert_eq!(rank.join().unwrap(), (vec![0, 0, 1], 0));
            }
        });
        // Another session has its own choices.
        assert_eq!(of(0, 1), (vec![0, 1, 1], 1));
        assert_eq!(of(2, 1), (vec![0, 1, 1], 0));
    }
}
