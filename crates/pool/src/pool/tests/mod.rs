mod annex;
mod crash;
mod damage;
mod handles;
mod media;
mod model;
mod scrub;
mod support;
