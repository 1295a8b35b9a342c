//! The options, validated. PARAMETERS.md has a paragraph on each; the names are Python's too.

use crate::error::{Error, Result};
use crate::rows::Dtype;

/// Which tokens a step attends to exactly, besides sink and window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection {
    /// The best tokens of the candidate pages.
    Tokens,
    /// Whole pages, ranked by their best token for each query head in turn (the paper).
    Pages,
}

/// What stands for everything that is not attended exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// Counts, mean keys and mean values of tree nodes.
    Summary,
    /// Nothing: softmax is taken over the exact tokens alone.
    Drop,
}

/// A crop of so many tokens stays inside the window.
const LEAST_WINDOW: usize = 32;

/// Measured: below this, scoring every child is faster than walking along projections to nine in
/// ten of the nearest (dim 64: 28 against 54 us at 2,048 children, 306 against 443 us at 16,384).
const SCAN_BELOW: usize = 16_384;

/// Scoring fewer keys than this saves less than it loses.
const LEAST_CANDIDATES: usize = 256;

/// Unless the options say otherwise, a device holds so many times what one position selects at most.
const DEVICE_FACTOR: usize = 4;

/// Unless the options say otherwise, a step opens `BASE_SHARE` of the lowest upper nodes and scores
/// `BASE_FACTOR` times the budget up to so many tokens. Beyond, it opens as many nodes as there, and
/// scores more candidates, so that the rows it reads grow about as the square root of the length while
/// the error hardly does (docs/findings.md). Beyond `WIDE_LENGTH` it opens more again, and beyond
/// `WHOLE_LENGTH` it scores only as many of the lowest upper nodes as there are at that length.
const BASE_LENGTH: usize = 8192;
const BASE_SHARE: f32 = 0.75;
const BASE_FACTOR: f32 = 8.0;
const CANDIDATES_POWER: f32 = 0.55;
const WIDE_LENGTH: usize = 32_768;
const WIDE_POWER: f32 = 0.4;
const WHOLE_LENGTH: usize = 131_072;

/// Shape of a tree.
#[derive(Debug, Clone, PartialEq)]
pub struct TreeOptions {
    pub page_size: usize,
    pub page_capacity: usize,
    pub fanout: usize,
    pub refine_passes: usize,
    /// Children up to which a node's are all scored; those of a larger family are visited in the
    /// order of their projections.
    pub scan_below: usize,
    pub summary_dtype: Dtype,
    pub seed: u64,
}

/// Options of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    pub token_budget: usize,
    pub sink_tokens: usize,
    pub window_tokens: usize,
    /// `None`: by the length of the tree, as for `open_fraction`.
    pub candidate_factor: Option<usize>,
    pub open_fraction: Option<f32>,
    pub field_of_view: usize,
    pub selection: Selection,
    pub tail: Tail,
    pub dense_below: usize,
    /// Token slots per KV head on a device, besides those for sink and window. `None`: as many as
    /// four positions select at most.
    pub device_tokens: Option<usize>,
    /// 0: all that the process may use.
    pub num_threads: usize,
    pub tree: TreeOptions,
}

impl Default for TreeOptions {
    fn default() -> Self {
        Self {
            page_size: 6,
            page_capacity: 12,
            fanout: 12,
            refine_passes: 2,
            scan_below: SCAN_BELOW,
            summary_dtype: Dtype::F16,
            seed: 0,
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            token_budget: 64,
            sink_tokens: 32,
            window_tokens: 64,
            candidate_factor: None,
            open_fraction: None,
            field_of_view: 32,
            selection: Selection::Tokens,
            tail: Tail::Summary,
            dense_below: 0,
            device_tokens: None,
            num_threads: 0,
            tree: TreeOptions::default(),
        }
    }
}

impl TreeOptions {
    pub fn validate(&self) -> Result<()> {
        at_least("page_size", self.page_size, 1)?;
        at_least("page_capacity", self.page_capacity, self.page_size)?;
        at_least("fanout", self.fanout, 2)
    }
}

impl Options {
    pub fn validate(&self) -> Result<()> {
        at_least("token_budget", self.token_budget, 1)?;
        at_least("window_tokens", self.window_tokens, 1)?;
        at_least("candidate_factor", self.candidate_factor.unwrap_or(1), 1)?;
        at_least("field_of_view", self.field_of_view, 1)?;
        let most = self.most_selected();
        at_least("device_tokens", self.device_tokens.unwrap_or(most), most)?;
        let fraction = self.open_fraction.unwrap_or(1.0);
        if !(fraction > 0.0 && fraction <= 1.0) {
            return Err(Error::Config {
                option: "open_fraction",
                expected: "above 0 and at most 1".into(),
                got: fraction.to_string(),
            });
        }
        if self.selection == Selection::Pages && self.tail == Tail::Summary {
            return Err(Error::Config {
                option: "tail",
                expected: "\"drop\" with selection \"pages\"".into(),
                got: "\"summary\"".into(),
            });
        }
        self.tree.validate()
    }

    /// Tokens that the window keeps when others leave it.
    pub fn window(&self) -> usize {
        self.window_tokens.max(LEAST_WINDOW)
    }

    /// Most tokens that one position selects: pages are taken whole, the first whatever its length.
    pub fn most_selected(&self) -> usize {
        match self.selection {
            Selection::Tokens => self.token_budget,
            Selection::Pages => self.token_budget.max(self.tree.page_capacity),
        }
    }

    /// Token slots per KV head on a device for what is selected.
    pub fn device_tokens(&self) -> usize {
        self.device_tokens
            .unwrap_or_else(|| self.most_selected().saturating_mul(DEVICE_FACTOR))
    }

    /// Keys of a tree of so many tokens scored exactly in one step: so many that a small budget
    /// chooses well.
    pub fn candidates(&self, tokens: usize) -> usize {
        let wanted = match self.candidate_factor {
            Some(factor) => self.token_budget.saturating_mul(factor),
            None => {
                let factor = BASE_FACTOR * beyond(BASE_LENGTH, tokens).powf(CANDIDATES_POWER);
                (self.token_budget as f32 * factor) as usize
            }
        };
        wanted.max(LEAST_CANDIDATES)
    }

    /// Share of the lowest upper level of a tree of so many tokens that a step opens.
    pub fn open_share(&self, tokens: usize) -> f32 {
        self.open_fraction.unwrap_or_else(|| {
            BASE_SHARE * beyond(WIDE_LENGTH, tokens).powf(WIDE_POWER) / beyond(BASE_LENGTH, tokens)
        })
    }

    /// Share of the lowest upper level of a tree of so many tokens that a step scores.
    pub fn scored_share(&self, tokens: usize) -> f32 {
        match self.open_fraction {
            Some(_) => 1.0,
            None => WHOLE_LENGTH as f32 / tokens.max(WHOLE_LENGTH) as f32,
        }
    }
}

/// The length as a multiple of another one, at least 1.
fn beyond(base: usize, tokens: usize) -> f32 {
    tokens.max(base) as f32 / base as f32
}

fn at_least(option: &'static str, got: usize, low: usize) -> Result<()> {
    if got >= low {
        return Ok(());
    }
    Err(Error::Config {
        option,
        expected: format!("at least {low}"),
        got: got.to_string(),
    })
}
