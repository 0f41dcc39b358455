//! Expands outlines: writes out every loop and block, one statement per line.

use std::collections::BTreeMap;

/// Maximum size of an expansion, so that an invalid file cannot fill the memory.
const MAX_BYTES: usize = 64 << 20;

/// Returns an outline with every loop and block written out, one statement per line. Texts that are
/// not outlines are expanded as far as possible.
#[must_use]
pub fn expand(outline: &str) -> String {
    let mut blocks: BTreeMap<&str, String> = BTreeMap::new();
    let mut out = String::new();
    let mut shared = 0;
    let mut lines = outline.lines().peekable();
    while let Some(line) = lines.next() {
        let (title, first) = match line.split_once(']') {
            Some((title, first)) if line.starts_with('[') => (title, first),
            _ => ("", line),
        };
        let mut text = vec![first.trim()];
        while let Some(line) = lines.next_if(|l| !l.starts_with('[')) {
            text.push(line.trim());
        }
        let text = text.join(" ");
        let room = MAX_BYTES.saturating_sub(out.len() + shared);
        let mut body = String::new();
        let mut rest = Text {
            rest: &text,
            blocks: &blocks,
            room,
        };
        rest.list(0, &mut body);
        if let Some(name) = title.strip_prefix("[block ") {
            shared += body.len();
            blocks.insert(name, body);
            continue;
        }
        if !title.is_empty() {
            out.push_str(title);
            out.push_str("]\n");
        }
        out.push_str(&body);
    }
    out
}

/// Maximum nesting of loops.
const MAX_DEPTH: usize = 64;

struct Text<'a> {
    rest: &'a str,
    blocks: &'a BTreeMap<&'a str, String>,
    room: usize,
}

impl<'a> Text<'a> {
    /// Expands statements up to and including the brace that ends the loop, or up to the end of the
    /// text.
    fn list(&mut self, depth: usize, out: &mut String) {
        let mut label = "";
        loop {
            let goes_on = self.rest.starts_with(',');
            self.rest = self.rest.trim_start_matches([';', ',', ' ']);
            if self.rest.is_empty() {
                return;
            }
            if let Some(rest) = self.rest.strip_prefix('}') {
                self.rest = rest;
                if depth > 0 {
                    return;
                }
            } else if let Some(times) = self.open().filter(|_| depth < MAX_DEPTH) {
                let mut once = String::new();
                self.list(depth + 1, &mut once);
                if !once.is_empty() {
                    let most = self.room.saturating_sub(out.len()) / once.len();
                    out.push_str(&once.repeat(most.min(times as usize)));
                }
            } else {
                label = self.statement(if goes_on { label } else { "" }, out);
            }
        }
    }

    /// Reads the start of a loop, `12x{`, and returns its count.
    fn open(&mut self) -> Option<u32> {
        let digits = self.rest.bytes().take_while(u8::is_ascii_digit).count();
        let (times, rest) = self.rest.split_at(digits);
        self.rest = rest.strip_prefix("x{")?;
        times.parse().ok()
    }

    /// Expands one statement. A statement without a label gets `label`. Returns its label.
    fn statement(&mut self, label: &'a str, out: &mut String) -> &'a str {
        let end = self.rest.find([';', ',', '}']).unwrap_or(self.rest.len());
        let (text, rest) = self.rest.split_at(end);
        self.rest = rest;
        match text.strip_prefix("run ").and_then(|n| self.blocks.get(n)) {
            Some(block) if block.len() <= self.room.saturating_sub(out.len()) => {
                out.push_str(block);
            }
            Some(_) => {}
            None => {
                if !label.is_empty() {
                    out.push_str(label);
                    out.push_str(": ");
                }
                out.push_str(text);
                out.push('\n');
            }
        }
        if label.is_empty() {
            super::print::label(text).unwrap_or_default()
        } else {
            label
        }
    }
}
