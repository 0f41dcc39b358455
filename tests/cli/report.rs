//! `shardlab report`, and its pages in a browser.

use crate::{json, shardlab, stdout};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Writes a page with a prediction and a measurement of one program, and a third run.
fn page(dir: &Path) -> PathBuf {
    let store = dir.join("store").display().to_string();
    shardlab(&["exec", "llama-tiny", "--steps", "12", "--store", &store])
        .assert()
        .success();
    let id = run_id(&store);
    let out = dir.join("page.html");
    let text = stdout(&[
        "report",
        "llama-tiny",
        &id,
        "llama3-8b-4xh200",
        "--store",
        &store,
        "--title",
        "A & B <c>",
        "--out",
        &out.display().to_string(),
    ]);
    assert!(text.contains("page.html: 3 runs, "), "{text}");
    out
}

/// Returns the id of the only run of a store.
fn run_id(store: &str) -> String {
    let line = stdout(&["runs", "--json", "--store", store]);
    let run: serde_json::Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
    run["id"].as_str().unwrap().to_owned()
}

/// Returns the command of an installed browser.
fn chromium() -> &'static str {
    let known = ["chromium", "chromium-browser", "google-chrome"];
    let found = known.into_iter().find(|name| {
        let version = Command::new(name).arg("--version").output();
        version.is_ok_and(|o| o.status.success())
    });
    found.expect("Chromium is not installed")
}

/// Returns the page's elements after its scripts have run, and the errors that the browser reports.
fn open(browser: &str, page: &Path, profile: &Path) -> (String, Vec<String>) {
    open_at(browser, page, profile, None)
}

/// Like [`open`], in a window of this size.
fn open_at(
    browser: &str,
    page: &Path,
    profile: &Path,
    size: Option<&str>,
) -> (String, Vec<String>) {
    let output = Command::new(browser)
        .args(size.map(|s| format!("--window-size={s}")))
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
        ])
        .args(["--virtual-time-budget=3000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("file://{}", page.display()))
        .output()
        .unwrap();
    let complaints = String::from_utf8_lossy(&output.stderr);
    let complaints = complaints.lines().filter(|l| l.contains("CONSOLE"));
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        complaints.map(str::to_owned).collect(),
    )
}

/// A script in the page that tries buttons, keys and the pointer on a timeline, and writes the
/// results to an attribute.
const PROBE: &str = r#"<script>
const seen = [];
const f = document.querySelector(".timeline");
const bars = () => f.querySelector(".bars").innerHTML;
const axis = () => f.querySelector(".axis").textContent;
const hover = () => f.querySelector(".hover").textContent;
const whole = [bars(), axis()];
const click = (act) => f.querySelector('[data-act="' + act + '"]').click();
const is = (what, ok) => seen.push(what + "=" + ok);
click("in"); is("zoomed", bars() !== whole[0] && axis() !== whole[1]);
click("gap"); is("gap", /^exposed by .* waiting for /.test(hover()));
click("peak"); is("peak", /^memory at .* allocated, .* reserved; /.test(hover()));
const box0 = f.querySelector(".mem").getAttribute("viewBox");
click("all"); is("memory-zoom", f.querySelector(".mem").getAttribute("viewBox") !== box0);
const find = f.querySelector("input[type=search]");
find.value = "layers.1"; find.dispatchEvent(new Event("input"));
is("found", /^[1-9][0-9]* matches/.test(hover()));
find.value = ""; find.dispatchEvent(new Event("input"));
click("all"); is("reset", bars() === whole[0] && axis() === whole[1]);
const svg = f.querySelector("svg"), box = svg.getBoundingClientRect();
for (let i = 0; i < 100; i++)
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width * (0.2 + i / 200), clientY: box.top + (box.width * 30) / 1520, bubbles: true }));
is("hover", / on compute: .* its start waited for /.test(hover()));
const memory = JSON.parse(f.querySelector(".spans").textContent).memory;
const point = (y) => svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width * 0.5, clientY: box.top + (box.width * y) / 1520, bubbles: true }));
point(memory.top + memory.height / 2); is("memory-hover", hover().startsWith("memory at "));
f.querySelector(".plot").dispatchEvent(new KeyboardEvent("keydown", { key: "+", bubbles: true }));
is("key", axis() !== whole[1]);
const ground = () => getComputedStyle(document.documentElement).backgroundColor;
const before = ground();
document.getElementById("theme").click(); is("theme", ground() !== before);
is("wide", document.documentElement.scrollWidth <= innerWidth);
document.documentElement.setAttribute("data-seen", seen.join(" "));
</script></body>"#;

/// Acceptance: the page opens in Chromium without errors and shows the timeline, which can be
/// zoomed.
#[test]
#[ignore = "needs Chromium"]
fn a_page_works_in_a_browser() {
    let dir = tempfile::tempdir().unwrap();
    let page = page(dir.path());
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(text.contains("<title>A &amp; B &lt;c&gt;</title>"));
    let browser = chromium();
    let profile = dir.path().join("profile");
    let (dom, complaints) = open(browser, &page, &profile);
    assert!(complaints.is_empty(), "{complaints:?}");
    assert_eq!(dom.matches("class=\"timeline live\"").count(), 3);
    let probed = dir.path().join("probed.html");
    std::fs::write(&probed, text.replace("</body>", PROBE)).unwrap();
    let (dom, complaints) = open(browser, &probed, &profile);
    assert!(complaints.is_empty(), "{complaints:?}");
    let seen = dom
        .split("data-seen=\"")
        .nth(1)
        .and_then(|t| t.split('"').next());
    assert_eq!(
        seen,
        Some(
            "zoomed=true gap=true peak=true memory-zoom=true found=true reset=true \
             hover=true memory-hover=true key=true theme=true wide=true"
        )
    );
    // On a phone as well, only the plots scroll sideways.
    let (dom, _) = open_at(browser, &probed, &profile, Some("390,844"));
    assert!(dom.contains("wide=true"), "too wide for a phone");
}

/// A script in the page that zooms one timeline with and without the others.
const LINKED: &str = r#"<script>
const [f, g] = document.querySelectorAll(".timeline");
const axis = (t) => t.querySelector(".axis").textContent;
const zoom = () => f.querySelector('[data-act="in"]').click();
const whole = axis(g);
zoom();
const together = axis(g) !== whole && axis(g) === axis(f);
f.querySelector(".linked input").click();
zoom();
document.documentElement.setAttribute("data-seen", together + " " + (axis(g) !== axis(f)));
</script></body>"#;

/// The timelines of two runs move together until the reader separates them.
#[test]
#[ignore = "needs Chromium"]
fn timelines_move_together() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("two.html");
    let out = page.display().to_string();
    let set = "fsdp.prefetch_forward=0";
    stdout(&["report", "small-native", "--set-b", set, "--out", &out]);
    let text = std::fs::read_to_string(&page).unwrap();
    std::fs::write(&page, text.replace("</body>", LINKED)).unwrap();
    let (dom, complaints) = open(chromium(), &page, &dir.path().join("profile"));
    assert!(complaints.is_empty(), "{complaints:?}");
    assert!(dom.contains("data-seen=\"true true\""));
}

#[test]
fn an_option_against_itself_as_markdown_with_pictures() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("both.md");
    stdout(&[
        "report",
        "small-native",
        "--set-b",
        "fsdp.prefetch_forward=0",
        "--png",
        "--out",
        &out.display().to_string(),
    ]);
    let text = std::fs::read_to_string(&out).unwrap();
    assert!(
        text.contains("small-native fsdp.prefetch\\_forward=0"),
        "{text}"
    );
    assert!(
        text.contains("| fsdp.prefetch\\_forward | 1 | 0 |"),
        "{text}"
    );
    for name in ["streams-0", "streams-1"] {
        assert!(
            text.contains(&format!("(<both-plots/{name}.png>)")),
            "{name}: {text}"
        );
        let png = std::fs::read(dir.path().join(format!("both-plots/{name}.png"))).unwrap();
        assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"), "{name}");
        // Width and height. All drawings have this width.
        assert_eq!(png[16..20], 1520u32.to_be_bytes(), "{name}");
    }
}

/// The header says what the numbers are based on, and when and how the page was created. For two
/// runs, the second card says how its run differs.
#[test]
fn a_page_says_what_it_rests_on_and_what_differs() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("two.html").display().to_string();
    let set = "fsdp.prefetch_forward=0";
    stdout(&["report", "llama3-8b-4xh200", "--set-b", set, "--out", &out]);
    let text = std::fs::read_to_string(&out).unwrap();
    let header = text.split("<header>").nth(1).unwrap();
    let header = header.split("</header>").next().unwrap();
    for words in [
        "Predicted for 4 x h200-nvlink; measured on ",
        "step time ±",
        "UTC with shardlab ",
        "shardlab report llama3-8b-4xh200 --set-b fsdp.prefetch_forward=0 --out ",
    ] {
        assert!(header.contains(words), "{words}: {header}");
    }
    let cards: Vec<&str> = text.split("class=\"card\"").skip(1).collect();
    assert!(!cards[0].contains("class=\"change"), "{}", cards[0]);
    assert!(cards[1].contains("class=\"change bad\">"), "{}", cards[1]);
    // A plot with one dot per prediction would repeat the cards.
    assert!(!text.contains("id=\"steps-t\""));
    assert_eq!(text.matches("class=\"mem\"").count(), 2);
    assert!(
        text.contains("device memory 139"),
        "the limit is always visible"
    );
}

#[test]
fn a_sweep_has_a_map() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("sweep.html").display().to_string();
    stdout(&[
        "report",
        "small-native",
        "--axis",
        "fsdp.policy=[\"native\", \"fsdp2\"]",
        "--axis",
        "fsdp.prefetch_forward=[0, 1]",
        "--out",
        &out,
    ]);
    let text = std::fs::read_to_string(&out).unwrap();
    assert!(text.contains("Step time by fsdp.policy and fsdp.prefetch_forward"));
    assert!(text.contains("; the best is "));
    assert!(text.contains("Throughput vs. memory by policy, prefetch_forward"));
    assert!(text.contains("points on the front: "));
    // The command of a point contains its own options, and the common text appears once.
    let out = dir.path().join("sweep.md").display().to_string();
    let axis = "fsdp.prefetch_forward=[0, 1]";
    let args = ["report", "small-native", "--axis", axis, "--out", &out];
    stdout(&[&args[..], &["--set", "train.steps=3"]].concat());
    let text = std::fs::read_to_string(&out).unwrap();
    let command = "shardlab sim small-native --set train.steps=3 --set fsdp.prefetch_forward=1\n";
    assert!(text.contains(command), "{text}");
    assert_eq!(text.matches("Scenario of ").count(), 1, "{text}");
}

/// Saved runs of one scenario are distinguished by the options in which they differ, not only by
/// ids.
#[test]
fn kept_runs_are_labelled_by_what_differs() {
    let dir = tempfile::tempdir().unwrap();
    let [store, out] = ["store", "x.md"].map(|n| dir.path().join(n).display().to_string());
    let mut ids = Vec::new();
    for (scenario, depth) in [
        ("small-native", "0"),
        ("small-native", "2"),
        ("small-fsdp2", "1"),
    ] {
        let depth = format!("fsdp.prefetch_forward={depth}");
        let set = ["--set", "train.steps=3", "--set", &depth];
        let run = [&["sim", scenario, "--json", "--store", &store], &set[..]].concat();
        let id = json(&run)[0]["run_id"].as_str().unwrap().to_owned();
        ids.push(id.rsplit('-').next().unwrap().to_owned());
    }
    let args = ["report", "--store", &store, "--out", &out];
    let runs = ids.iter().map(String::as_str);
    stdout(&args.into_iter().chain(runs).collect::<Vec<_>>());
    let text = std::fs::read_to_string(&out).unwrap();
    // Options that all runs of a scenario share do not distinguish them, and a single run needs no
    // distinction.
    for label in [
        format!("small-native prefetch_forward=0 ({})", ids[0]),
        format!("small-native prefetch_forward=2 ({})", ids[1]),
        format!("small-fsdp2 ({})", ids[2]),
    ] {
        let row = format!("| {} |", label.replace('_', "\\_"));
        assert!(text.contains(&row), "{row} in {text}");
    }
}

#[test]
fn bad_input_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.html").display().to_string();
    let store = dir.path().join("none").display().to_string();
    let cases: [(&[&str], &str); 5] = [
        (&["small-native", "--out", "x.pdf"], "ends in .html or .md"),
        (
            &["small-nativ", "--out", &out, "--store", &store],
            "small-nativ",
        ),
        (
            &["small-native", "--out", "/no/such/dir/x.html"],
            "/no/such/dir/x.html",
        ),
        (
            &["small-native", "--out", &out, "--axis", "train.steps=[1,2"],
            "train.steps",
        ),
        (
            &["small-native", "--out", &out, "--set", "fsdp.polcy=native"],
            "did you mean",
        ),
    ];
    for (args, words) in cases {
        let output = shardlab(&[&["report"], args].concat()).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {err}");
        assert!(err.contains(words), "{args:?}: {err}");
    }
    // A failed call does not leave a file.
    assert!(!Path::new(&out).exists());
}
