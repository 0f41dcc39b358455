//! The dashboard in a real terminal, driven through tmux: sends keys and reads the screen.

use crate::processes::{all_end, children, signal};
use crate::shardlab;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

#[test]
fn without_a_terminal_it_says_so() {
    let output = shardlab(&["dash", "llama-tiny"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.starts_with("error: dash needs a terminal"), "{text}");
}

/// A terminal with a shell; removed when dropped.
struct Tmux {
    socket: String,
    folder: tempfile::TempDir,
}

impl Tmux {
    fn start(name: &str, columns: u16, rows: u16) -> Self {
        let tmux = Self {
            socket: format!("shardlab-{name}-{}", std::process::id()),
            folder: tempfile::tempdir().unwrap(),
        };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        // A bare shell without the user's prompt and history.
        tmux.call(&[
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-s",
            "main",
            "-x",
            &columns,
            "-y",
            &rows,
            "env PS1='ready> ' HISTFILE= bash --norc --noprofile",
        ]);
        tmux.wait_for("ready>");
        tmux
    }

    fn call(&self, args: &[&str]) -> Output {
        Command::new("tmux")
            .args(["-L", &self.socket])
            .args(args)
            .env("XDG_STATE_HOME", self.folder.path())
            .env("SHARDLAB_STORE", self.folder.path().join("runs"))
            .env_remove("TMUX")
            .env_remove("NO_COLOR")
            .output()
            .unwrap()
    }

    /// Types text, then presses named keys.
    fn type_text(&self, text: &str) {
        self.call(&["send-keys", "-t", "main", "-l", text]);
    }

    fn press(&self, keys: &[&str]) {
        for key in keys {
            self.call(&["send-keys", "-t", "main", key]);
        }
    }

    fn screen(&self) -> String {
        let output = self.call(&["capture-pane", "-t", "main", "-p"]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Waits until the screen satisfies `done` twice in a row, because the first frame may be
    /// incomplete. The time limit is for machines that hang, not for slow ones.
    #[track_caller]
    fn wait(&self, what: &str, done: impl Fn(&str) -> bool) -> String {
        let begin = Instant::now();
        let mut before = false;
        loop {
            let screen = self.screen();
            let now = done(&screen);
            if now && before {
                return screen;
            }
            before = now;
            assert!(
                begin.elapsed() < Duration::from_secs(180),
                "never saw {what}; the screen:\n{screen}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    #[track_caller]
    fn wait_for(&self, text: &str) -> String {
        self.wait(&format!("`{text}`"), |screen| screen.contains(text))
    }

    /// Returns the terminal settings that the shell reports.
    fn settings(&self, mark: &str) -> String {
        let file = self.folder.path().join(mark);
        self.type_text(&format!(
            "stty -a > {} && echo done-{mark}\n",
            file.display()
        ));
        self.wait(mark, |s| {
            s.lines().any(|l| l.trim() == format!("done-{mark}"))
        });
        std::fs::read_to_string(file).unwrap()
    }

    fn dash(&self, more: &str) {
        let binary = env!("CARGO_BIN_EXE_shardlab");
        self.type_text(&format!(
            "clear; {binary} dash {more}; echo ended with $?\n"
        ));
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.call(&["kill-server"]);
    }
}

/// Returns the step time in the prediction pane.
fn step(screen: &str) -> Option<String> {
    let line = screen
        .lines()
        .find(|l| l.contains("step ") && l.contains(" ms") && l.contains("MFU"))?;
    let (_, behind) = line.split_once("step ")?;
    behind.split_whitespace().next().map(str::to_owned)
}

/// Changes prefetch, simulates, zooms into the backward of one block, trains live, compares and
/// quits. The terminal is restored.
#[test]
#[ignore = "needs tmux"]
fn a_session_from_a_changed_option_to_a_comparison() {
    let tmux = Tmux::start("session", 120, 40);
    let before = tmux.settings("before");
    tmux.dash("llama-tiny");
    tmux.wait("the prediction", |s| {
        s.contains("▸ llama-tiny") && step(s).is_some()
    });
    // Without prefetch in both directions, the tiny model waits for its gathers.
    tmux.press(&["Tab"]);
    tmux.type_text("/prefetch");
    tmux.press(&["Enter", "Left"]);
    tmux.wait_for("0  (was 1)");
    tmux.press(&["Down", "Left"]);
    let screen = tmux.wait("the changed prediction", |s| {
        s.contains("●2 changed") && step(s).is_some() && s.contains("% ▲")
    });
    assert_eq!(screen.matches("0  (was 1)").count(), 2, "{screen}");
    // Simulate, which opens the timeline.
    tmux.type_text("r");
    tmux.wait("the timeline", |s| {
        s.contains("llama-tiny: #1 predicted") && s.contains("all_gather")
    });
    // Zoom into the backward of one block.
    tmux.type_text("u");
    tmux.type_text("layers.1 backward");
    tmux.press(&["Enter"]);
    let screen = tmux.wait("the block's backward", |s| {
        s.contains("╎layers.1 backward") && !s.contains(", 1 x")
    });
    assert!(screen.contains("blocked by:"), "{screen}");
    // Train live.
    tmux.type_text("3");
    tmux.type_text("x");
    tmux.wait("training", |s| {
        s.contains("training   step") || s.contains("✓ done")
    });
    tmux.wait("the end of the training", |s| s.contains("✓ done"));
    tmux.wait_for("saved as");
    // Both runs are shown, one above the other.
    tmux.type_text("2");
    let screen = tmux.wait("both runs", |s| {
        s.contains("llama-tiny: #1 predicted") && s.contains("│ #2 measured")
    });
    assert!(
        screen.lines().any(|l| l.starts_with("  measured")),
        "{screen}"
    );
    // Compare them.
    tmux.type_text("6");
    tmux.type_text("c");
    tmux.wait("the comparison", |s| {
        s.contains("sim") && s.contains("exec") && s.contains("step")
    });
    tmux.type_text("q");
    let screen = tmux.wait_for("ended with 0");
    assert!(
        !screen.contains("Compare"),
        "the screen is the shell's again:\n{screen}"
    );
    assert_eq!(tmux.settings("after"), before);
    // The change is still present.
    tmux.dash("");
    tmux.wait_for("●2 changed");
    tmux.press(&["C-c"]);
    tmux.wait_for("ended with 0");
    assert_eq!(tmux.settings("last"), before);
}

/// The first session starts with the example of the documentation. Scenarios for tests are listed
/// on request. The view of changes applies a change with one key and undoes it with another.
#[test]
#[ignore = "needs tmux"]
fn a_first_session_finds_and_applies_a_change() {
    let tmux = Tmux::start("whatif", 120, 40);
    tmux.dash("");
    let screen = tmux.wait("the example", |s| {
        s.contains("▸ llama3-8b-4xh200") && step(s).is_some()
    });
    assert!(screen.contains(" tests "), "{screen}");
    assert!(!screen.contains("small-native"), "{screen}");
    // An exact match of the name comes first.
    tmux.type_text("/small-native");
    tmux.wait_for("▸ small-native");
    tmux.press(&["Enter"]);
    tmux.type_text("i");
    let screen = tmux.wait("the changes", |s| {
        s.contains("What-if small-native") && s.contains("(as it is)") && !s.contains("explaining")
    });
    let before = screen
        .lines()
        .find(|l| l.contains("▸"))
        .unwrap_or_default()
        .to_owned();
    tmux.press(&["Enter"]);
    tmux.wait("the applied change", |s| {
        s.contains("What-if small-native ●") && !s.contains("explaining")
    });
    tmux.type_text("1");
    tmux.wait_for("changed");
    tmux.type_text("8u");
    tmux.wait("the changes as before", |s| {
        s.lines().any(|l| l == before) && !s.contains("●")
    });
    tmux.type_text("q");
    tmux.wait_for("ended with 0");
}

/// The dashboard follows a resize, handles a terminal that is too small, and restores the terminal
/// after a signal.
#[test]
#[ignore = "needs tmux"]
fn it_follows_the_terminals_size_and_gives_it_back_on_a_signal() {
    let tmux = Tmux::start("size", 100, 30);
    let before = tmux.settings("before");
    tmux.dash("--no-state small-native");
    tmux.wait_for("▸ small-native");
    tmux.call(&["resize-window", "-t", "main", "-x", "60", "-y", "15"]);
    tmux.wait_for("is too small");
    tmux.call(&["resize-window", "-t", "main", "-x", "160", "-y", "50"]);
    tmux.wait_for("shardlab │");
    tmux.call(&["resize-window", "-t", "main", "-x", "100", "-y", "30"]);
    signal("TERM", tmux.dashboard());
    tmux.wait_for("ended with 0");
    // The first line contains the size, which has changed.
    let rest = |text: String| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(rest(tmux.settings("after")), rest(before));
}

/// Ctrl-Z returns the terminal to the shell, also while text is being typed. `fg` resumes in the
/// same state.
#[test]
#[ignore = "needs tmux"]
fn it_can_be_suspended() {
    let tmux = Tmux::start("suspend", 100, 30);
    let before = tmux.settings("before");
    tmux.dash("--no-state small-native");
    tmux.wait("the prediction", |s| {
        s.contains("▸ small-native") && step(s).is_some()
    });
    tmux.type_text("/small");
    tmux.wait_for(" search: small");
    tmux.press(&["C-z"]);
    let screen = tmux.wait_for("Stopped");
    assert!(!screen.contains("Prediction"), "{screen}");
    assert_eq!(tmux.settings("between"), before);
    tmux.type_text("clear; fg; echo ended with $?\n");
    tmux.wait("the same again", |s| {
        s.contains("▸ small-native") && s.contains(" search: small")
    });
    tmux.press(&["C-c"]);
    tmux.wait("nothing typed", |s| !s.contains(" search: "));
    tmux.type_text("q");
    tmux.wait_for("ended with 0");
    assert_eq!(tmux.settings("after"), before);
}

/// Ctrl-Z stops the whole process group, as a terminal does by default. Otherwise, a script that
/// waits for the dashboard would keep the terminal.
#[test]
#[ignore = "needs tmux"]
fn a_script_around_it_is_suspended_too() {
    let tmux = Tmux::start("script", 100, 30);
    let before = tmux.settings("before");
    let script = tmux.folder.path().join("wrapper.sh");
    let binary = env!("CARGO_BIN_EXE_shardlab");
    let text = format!("{binary} dash --no-state small-native\necho behind it: $?\n");
    std::fs::write(&script, text).unwrap();
    tmux.type_text(&format!("clear; bash {}\n", script.display()));
    let there = |s: &str| s.contains("▸ small-native") && step(s).is_some();
    for mark in ["once", "twice"] {
        tmux.wait("the prediction", there);
        tmux.press(&["C-z"]);
        tmux.wait("the shell", |s| s.contains("Stopped") && !there(s));
        assert_eq!(tmux.settings(mark), before);
        tmux.type_text("clear; fg\n");
    }
    tmux.wait("the same again", there);
    tmux.type_text("q");
    tmux.wait_for("behind it: 0");
    assert_eq!(tmux.settings("after"), before);
}

/// The smallest terminal, without colors: the mouse, a live training run that is stopped, and a
/// gate with its baseline.
#[test]
#[ignore = "needs tmux"]
fn a_small_terminal_without_colours() {
    let tmux = Tmux::start("small", 80, 24);
    let before = tmux.settings("before");
    let folder = tmux.folder.path().join("baselines");
    tmux.type_text("export NO_COLOR=1\n");
    tmux.dash(&format!("small-linear --baseline {}", folder.display()));
    tmux.wait("the prediction", |s| {
        s.contains("▸ small-linear") && step(s).is_some()
    });
    // Clicks on the second tab and on the first, and the mouse wheel in the list.
    let mouse = |code: u32, column: u32, row: u32| {
        tmux.type_text(&format!(
            "\u{1b}[<{code};{column};{row}M\u{1b}[<{code};{column};{row}m"
        ));
    };
    mouse(0, 18, 1);
    tmux.wait_for("No run is open");
    mouse(0, 4, 1);
    tmux.wait_for("▸ small-linear");
    mouse(65, 6, 8);
    tmux.wait("another scenario", |s| !s.contains("▸ small-linear"));
    mouse(64, 6, 8);
    tmux.wait_for("▸ small-linear");
    // A long training run is stopped; its steps are kept.
    tmux.press(&["Tab"]);
    tmux.type_text("/train.steps");
    tmux.press(&["Enter", "Enter", "C-u"]);
    tmux.type_text("900000");
    tmux.press(&["Enter"]);
    tmux.wait_for("(was 6)");
    tmux.type_text("x");
    tmux.wait_for("of 900000");
    tmux.type_text("s");
    let screen = tmux.wait("the end of the training", |s| {
        s.contains("stopped") && s.contains("saved as")
    });
    assert!(!screen.contains("done"), "{screen}");
    // Undo the change, and bless the current state.
    tmux.type_text("1");
    tmux.type_text("D");
    tmux.wait("no change", |s| !s.contains("changed"));
    tmux.type_text("b");
    tmux.wait_for("has no baseline");
    tmux.type_text("B");
    tmux.wait_for("y write it");
    tmux.type_text("y");
    tmux.wait_for("✓ passes against");
    assert!(folder.join("small-linear.toml").is_file());
    // The screen has no colors.
    let coloured = tmux.call(&["capture-pane", "-t", "main", "-p", "-e"]);
    let coloured = String::from_utf8_lossy(&coloured.stdout).into_owned();
    for code in coloured.split('\u{1b}').skip(1) {
        let numbers = code.trim_start_matches('[').split(['m', ';']);
        let mut numbers = numbers.map_while(|n| n.parse::<u32>().ok());
        assert!(
            numbers.all(|n| n < 30 || n == 39 || n == 49),
            "{coloured:?}"
        );
    }
    tmux.type_text("q");
    tmux.wait_for("ended with 0");
    assert_eq!(tmux.settings("after"), before);
}

/// A panic restores the terminal and is reported on it.
#[test]
#[ignore = "needs tmux"]
fn a_panic_gives_the_terminal_back() {
    let tmux = Tmux::start("panic", 100, 30);
    let flags = || {
        let what = "#{alternate_on} #{mouse_any_flag} #{cursor_flag}";
        let output = tmux.call(&["display-message", "-p", "-t", "main", what]);
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    let before = (tmux.settings("before"), flags());
    tmux.type_text("export SHARDLAB_TEST_PANIC=1\n");
    tmux.dash("--no-state small-native");
    let screen = tmux.wait_for("ended with 101");
    assert!(
        screen.contains("SHARDLAB_TEST_PANIC asks for it"),
        "{screen}"
    );
    assert_eq!((tmux.settings("after"), flags()), before);
}

impl Tmux {
    /// Returns the process id of the dashboard, the shell's only child.
    fn dashboard(&self) -> u32 {
        let pane = self.call(&["display-message", "-p", "-t", "main", "#{pane_pid}"]);
        let shell = String::from_utf8_lossy(&pane.stdout);
        let all = children(shell.trim().parse().unwrap());
        let [one] = all[..] else {
            panic!("{all:?} are the shell's children");
        };
        one
    }

    /// Returns the process ids of a training run's launcher and of its ranks.
    fn training(&self) -> (u32, Vec<u32>) {
        let all = children(self.dashboard());
        let [launcher] = all[..] else {
            panic!("{all:?} train");
        };
        (launcher, children(launcher))
    }

    fn runs(&self) -> usize {
        let list = std::fs::read_dir(self.folder.path().join("runs"));
        list.map_or(0, |l| {
            let names = l.flatten().map(|e| e.file_name());
            names
                .filter(|n| !n.to_string_lossy().starts_with('.'))
                .count()
        })
    }
}

/// A training run in separate processes, as on GPUs: its end, stopping it, the death of a rank, and
/// quitting during training.
#[test]
#[ignore = "needs tmux"]
fn a_training_in_processes_of_its_own() {
    let tmux = Tmux::start("processes", 100, 30);
    let before = tmux.settings("before");
    let quick = "--no-state --device cpu --processes small-native";
    tmux.dash(quick);
    tmux.wait("the prediction", |s| {
        s.contains("▸ small-native") && step(s).is_some()
    });
    tmux.type_text("x");
    tmux.wait_for("Train small-native on the CPU, one process per rank");
    let screen = tmux.wait("the end of the training", |s| {
        s.contains("✓ done   step 6 of 6") && s.contains("run #1 saved as")
    });
    // The progress of ranks in other processes is unknown.
    assert!(!screen.contains("issued"), "{screen}");
    let ranks = screen
        .lines()
        .filter(|l| l.contains(" ms ") && l.contains("KiB"));
    assert_eq!(
        ranks.count(),
        5,
        "four ranks and the peak of one:\n{screen}"
    );
    assert_eq!(tmux.runs(), 1);
    // The run can be compared like a training run in this process.
    tmux.type_text("2");
    tmux.wait("its timeline", |s| {
        s.contains("small-native: #1 measured") && s.contains("all_gather")
    });
    tmux.type_text("q");
    tmux.wait_for("ended with 0");
    // Stop a long run; its steps are kept.
    tmux.dash(&format!("{quick} --set train.steps=900000"));
    tmux.wait_for("●1 changed");
    let train = |tmux: &Tmux| {
        tmux.type_text("3x");
        tmux.wait("steps", |s| {
            s.contains("training   step") && s.contains("of 900000   left")
        });
        let (launcher, ranks) = tmux.training();
        assert_eq!(ranks.len(), 4);
        [vec![launcher], ranks].concat()
    };
    let all = train(&tmux);
    tmux.type_text("s");
    tmux.wait("the end of the training", |s| {
        s.contains("■ stopped") && s.contains("saved as")
    });
    all_end(&all);
    assert_eq!(tmux.runs(), 2);
    // A rank dies.
    let all = train(&tmux);
    signal("KILL", all[3]);
    let screen = tmux.wait_for("✗ failed");
    assert!(screen.contains("was killed (signal 9"), "{screen}");
    all_end(&all);
    // Quitting ends the training run, cleanly or not.
    let all = train(&tmux);
    tmux.type_text("q");
    tmux.wait_for("is still training");
    tmux.type_text("y");
    tmux.wait_for("ended with 0");
    all_end(&all);
    assert_eq!(tmux.settings("after"), before);
    tmux.dash(&format!("{quick} --no-store --set train.steps=900000"));
    tmux.wait_for("●1 changed");
    let all = train(&tmux);
    signal("KILL", tmux.dashboard());
    all_end(&all);
    assert_eq!(tmux.runs(), 2);
}

/// Without a store, the run is still available; its temporary folder is removed.
#[test]
#[ignore = "needs tmux"]
fn a_training_in_processes_that_is_not_kept() {
    let tmux = Tmux::start("passing", 80, 24);
    let passing = tmux.folder.path().join("passing");
    std::fs::create_dir(&passing).unwrap();
    tmux.type_text(&format!("export TMPDIR={}\n", passing.display()));
    tmux.dash("--no-state --no-store --device cpu --processes small-native");
    tmux.wait("the prediction", |s| {
        s.contains("▸ small-native") && step(s).is_some()
    });
    tmux.type_text("x");
    tmux.wait("the end of the training", |s| {
        s.contains("✓ done   step 6 of 6") && s.contains("#1 exec small-native finished")
    });
    tmux.type_text("2");
    tmux.wait_for("small-native: #1 measured");
    assert_eq!(std::fs::read_dir(&passing).unwrap().count(), 0);
    assert_eq!(tmux.runs(), 0);
    // To the dashboard, Ctrl-C is an ordinary key.
    tmux.type_text("3x");
    tmux.wait("the end of the training", |s| {
        s.contains("✓ done   step 6 of 6") && s.contains("#2 exec")
    });
    tmux.press(&["C-c"]);
    tmux.wait_for("ended with 0");
}
